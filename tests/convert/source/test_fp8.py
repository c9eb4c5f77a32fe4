"""FP8 checkpoints in the layouts that are published: read as their numbers times their scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from both import distance, expected_logits, run, session, token_ids
from safetensors.torch import load_file, save_file

from conftest import Tiny
from latentkv_convert.errors import ConvertError
from latentkv_convert.source.checkpoint import Checkpoint
from latentkv_convert.source.checkpoint_source import CheckpointSource

LARGEST = 448.0  # of float8_e4m3fn
FLOAT = {"type": "float", "num_bits": 8}
IDS = token_ids(40)


def compressed(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {**FLOAT, **weights}}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
LAYOUTS: dict[str, tuple[dict[str, Any], str, tuple[int, int] | None]] = {
    # quantization_config, name behind the weight's, rows and columns of a scale (0: all)
    "blocks": (FP8 | {"weight_block_size": [128, 128]}, "_scale_inv", (128, 128)),
    "small-blocks": (FP8 | {"weight_block_size": [48, 40]}, "_scale_inv", (48, 40)),
    "tensor": (FP8 | {"weight_block_size": None, "activation_scheme": "static"}, "_scale_inv", (0, 0)),
    "rows": (compressed(strategy="channel"), "_scale", (1, 0)),
    "compressed-blocks": (compressed(strategy="block", block_structure=[64, 32]), "_scale", (64, 32)),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", (0, 0)),
}


def quantized(
    directory: Path, layout: str, scale_type: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Rewrites the linear maps of a checkpoint's layers; what they are then, as float32."""
    config, end, (rows, columns) = LAYOUTS[layout]
    state, exact = load_file(directory / "model.safetensors"), {}
    for name in [name for name in state if name.startswith("model.layers.") and state[name].ndim == 2]:
        weight = state[name]
        n, m = rows or weight.shape[0], columns or weight.shape[1]
        grid = torch.zeros(-(-weight.shape[0] // n), -(-weight.shape[1] // m))
        numbers = torch.empty_like(weight)
        for i, j in np.ndindex(*grid.shape):
            at = (slice(i * n, (i + 1) * n), slice(j * m, (j + 1) * m))
            scale = weight[at].abs().max() / LARGEST
            grid[i, j] = torch.exp2(scale.log2().ceil()) if scale_type == torch.float8_e8m0fnu else scale
            numbers[at] = weight[at] / grid[i, j]
        state[name] = numbers.to(torch.float8_e4m3fn)
        exact[name] = (
            state[name].float()
            * grid.repeat_interleave(n, 0).repeat_interleave(m, 1)[: weight.shape[0], : weight.shape[1]]
        )
        state[name + end] = (grid.reshape(()) if (rows, columns) == (0, 0) else grid).to(scale_type)
        state[name.replace("weight", "activation_scale")] = torch.ones(())
    save_file(state, directory / "model.safetensors")
    with_config(directory, quantization_config=config)
    return exact


def with_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_numbers_times_scales(layout: str, tiny: Tiny) -> None:
    directory = tiny("qwen3", intermediate_size=200)
    exact = quantized(directory, layout)
    checkpoint = Checkpoint(directory)
    for name, weight in exact.items():
        assert np.array_equal(checkpoint.read(name), weight.numpy()), name
    assert CheckpointSource(directory).tensor("attn_q.weight", 1).shape == (128, 96)


def test_scales_that_are_powers_of_two(tiny: Tiny) -> None:
    directory = tiny("llama")
    exact = quantized(directory, "blocks", torch.float8_e8m0fnu)
    assert all(np.array_equal(Checkpoint(directory).read(name), exact[name].numpy()) for name in exact)


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [("mistral3", "tensor"), ("qwen3_moe", "blocks"), ("deepseek_v3", "small-blocks")],
)
def test_logits_are_those_of_its_weights(model_type: str, layout: str, tiny: Tiny, tmp_path: Path) -> None:
    """As transformers computes them of the same weights in floating point; experts among them."""
    directory, plain = tiny(model_type, name="fp8"), tiny(model_type, name="plain")
    exact = quantized(directory, layout)
    state = load_file(plain / "model.safetensors") | exact
    save_file(state, plain / "model.safetensors", metadata={"format": "pt"})
    expected = expected_logits(plain, IDS)
    model = run(directory, tmp_path / "plain.gguf", "--method", "none")
    assert distance(session(model).decode(IDS, output="all"), expected) < 1e-4


def test_what_is_missing_or_does_not_fit(tiny: Tiny) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    for change, message in (
        (lambda state: state.pop(name + "_scale_inv"), rf"{name}\] expected a scale of these FP8 weights"),
        (lambda state: state.update({name + "_scale_inv": torch.ones(2, 2)}), r"shape \[1, 1\] of blocks"),
    ):
        directory = tiny("llama", name=message[-6:].strip())
        quantized(directory, "blocks")
        state = load_file(directory / "model.safetensors")
        change(state)
        save_file(state, directory / "model.safetensors")
        with pytest.raises(ConvertError, match=message):
            Checkpoint(directory).read(name)


@pytest.mark.parametrize(
    ("config", "got"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq of 4 bits"),
        ({"quant_method": "gptq", "bits": 8}, "gptq of 8 bits"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt of NVFP4"),
        (compressed(num_bits=4, type="int") | {"format": "pack-quantized"}, "of 4 bits, pack-quantized"),
        ("fp8", "str"),
        (FP8 | {"weight_block_size": [0, 128]}, r"\[0, 128\]"),
    ],
)
def test_other_formats_are_refused_by_name(config: Any, got: str, tiny: Tiny) -> None:
    directory = tiny("llama")
    with_config(directory, quantization_config=config)
    with pytest.raises(ConvertError, match=f"^\\[config.json\\] expected .*; got .*{got}$"):
        CheckpointSource(directory)
