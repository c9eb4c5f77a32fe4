"""The same tensors from every layout of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from latentkv_convert.errors import ConvertError
from latentkv_convert.source.checkpoint import Checkpoint

Tiny = Callable[..., Path]
NAMES = [
    "model.embed_tokens.weight",
    "model.layers.2.self_attn.k_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


def as_bin(directory: Path, shards: int) -> None:
    """Rewrites safetensors as PyTorch files."""
    import torch
    from safetensors.torch import load_file

    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    if shards == 1:
        torch.save(state, directory / "pytorch_model.bin")
        return
    names = sorted(state)
    where = {name: f"pytorch_model-{i % shards + 1:05}.bin" for i, name in enumerate(names)}
    for file in set(where.values()):
        torch.save({name: state[name] for name in names if where[name] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))


def test_shards_and_pytorch_files_equal_one_file(tiny: Tiny) -> None:
    single = Checkpoint(tiny(name="single"))
    sharded = Checkpoint(tiny(name="sharded", shard_size="100KB"))
    assert len(list(sharded.directory.glob("*.safetensors"))) > 2
    for shards in (1, 3):
        directory = tiny(name=f"bin{shards}")
        as_bin(directory, shards)
        other = Checkpoint(directory)
        for name in NAMES:
            assert np.array_equal(single.read(name), sharded.read(name))
            assert np.array_equal(single.read(name), other.read(name))
            assert single.shape(name) == sharded.shape(name) == other.shape(name)


def test_base_model_names(tiny: Tiny) -> None:
    """Checkpoints of the model without its head have no leading `model.`."""
    from safetensors.torch import load_file, save_file

    directory = tiny()
    state = load_file(directory / "model.safetensors")
    save_file(
        {name.removeprefix("model."): value for name, value in state.items()}, directory / "model.safetensors"
    )
    assert np.array_equal(Checkpoint(directory).read(NAMES[1]), state[NAMES[1]].numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(tiny: Tiny, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    directory = tiny()
    state = load_file(directory / "model.safetensors")
    save_file({k: v.to(getattr(torch, dtype)) for k, v in state.items()}, directory / "model.safetensors")
    expected = state[NAMES[0]].to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(Checkpoint(directory).read(NAMES[0]), expected)


def test_integer_weights_are_refused(tiny: Tiny) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    directory = tiny()
    state = load_file(directory / "model.safetensors")
    state["model.norm.weight"] = torch.ones(96, dtype=torch.int32)
    save_file(state, directory / "model.safetensors")
    with pytest.raises(ConvertError, match=r"expected a dtype of F64, F32, F16, BF16, F8_E4M3, .*; got I32"):
        Checkpoint(directory).read("model.norm.weight")


def test_missing_shard_and_missing_tensor(tiny: Tiny) -> None:
    directory = tiny(shard_size="100KB")
    with pytest.raises(ConvertError, match=r"expected a tensor model\.nothing; got none among"):
        Checkpoint(directory).read("model.nothing")
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(
        ConvertError, match=f"expected the shard {shard.name} that the index names; got no such file"
    ):
        Checkpoint(directory)


def test_index_may_not_leave_the_directory(tiny: Tiny) -> None:
    directory = tiny(shard_size="100KB")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ConvertError, match="got no such file"):
        Checkpoint(directory)


def test_identity_changes_with_the_weights(tiny: Tiny) -> None:
    directory = tiny()
    before = Checkpoint(directory).identity()
    assert before == Checkpoint(directory).identity()
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(bytes(content))
    assert Checkpoint(directory).identity() != before
