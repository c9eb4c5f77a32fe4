"""The same tensors from every layout of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from latentkv_convert.errors import ConvertError
from latentkv_convert.source.checkpoint import Checkpoint
from latentkv_convert.source.checkpoint_source import CheckpointSource

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


def test_identity_changes_with_every_shard(tiny: Tiny) -> None:
    directory = tiny(shard_size="100KB")
    found = [Checkpoint(directory).identity()]
    for shard in sorted(directory.glob("*.safetensors")):
        content = bytearray(shard.read_bytes())
        content[-2] ^= 1
        shard.write_bytes(bytes(content))
        found.append(Checkpoint(directory).identity())
    assert len(set(found)) == len(found) > 3


def test_tensors_that_a_shard_has_beside_its_index(tiny: Tiny) -> None:
    """transformers reads all of a shard."""
    directory = tiny(shard_size="100KB")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    assert Checkpoint(directory).shape("model.norm.weight") == (96,)


def with_tensors(directory: Path, extra: dict[str, tuple[int, ...]], **config: object) -> Path:
    """Of ones, and with these fields of the config."""
    import torch
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(shape) for name, shape in extra.items()}, file)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("extra", "got"),
    [
        ({f"{LAYER}self_attn.q_proj.bias": (128,)}, f"{LAYER}self_attn.q_proj.bias;"),
        ({f"{LAYER}self_attn.q_proj.lora_A.default.weight": (8, 96)}, "q_proj.lora_A.default.weight; merge"),
        ({"score.weight": (1, 96)}, "score.weight;"),
        ({"lm_head.bias": (320,)}, "lm_head.bias;"),
        ({"model.layers.3.mlp.up_proj.weight": (128, 96)}, "model.layers.3.mlp.up_proj.weight;"),
        ({f"{LAYER}self_attn.q_norm.weight": (32,), "a": (1,), "b": (1,), "c": (1,)}, "a, b, c and 1 more;"),
        ({f"{LAYER}mlp.up_proj.weight_scale_inv.more": (1,)}, "weight_scale_inv.more;"),
    ],
    ids=str,
)
def test_tensors_that_nobody_reads_are_refused(
    extra: dict[str, tuple[int, ...]], got: str, tiny: Tiny
) -> None:
    directory = with_tensors(tiny(), extra)
    with pytest.raises(ConvertError) as error:
        CheckpointSource(directory)
    assert "[checkpoint] expected tensors that config.json's llama has; got " in str(error.value)
    assert got in str(error.value)


@pytest.mark.parametrize(
    ("extra", "note"),
    [
        ({f"{LAYER}self_attn.rotary_emb.inv_freq": (16,), "model.rotary_emb.inv_freq": (16,)}, ""),
        ({f"{LAYER}self_attn.masked_bias": (), f"{LAYER}self_attn.k_scale": (1,)}, ""),
        ({f"{LAYER}mlp.up_proj.weight_scale": (1,), f"{LAYER}mlp.up_proj.input_scale": (1,)}, ""),
        ({"mtp.fc.weight": (2, 2)}, "left out: 1 tensor of multi-token prediction"),
        (
            {"model.layers.3.eh_proj.weight": (2,), "vision_tower.a": (1,), "model.visual.b": (1,)},
            "left out: 1 tensor of multi-token prediction and 2 tensors of pictures and sounds",
        ),
    ],
    ids=str,
)
def test_what_is_left_out_is_known(extra: dict[str, tuple[int, ...]], note: str, tiny: Tiny) -> None:
    assert CheckpointSource(with_tensors(tiny(), extra, num_nextn_predict_layers=1)).note == note


def test_an_output_beside_the_token_table_that_it_is_tied_to(tiny: Tiny) -> None:
    """A copy is one; another is no tied output."""
    from safetensors.torch import load_file, save_file

    directory = tiny(tie_word_embeddings=True)
    file = directory / "model.safetensors"
    held = load_file(file)
    assert "lm_head.weight" not in held
    save_file(held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}, file)
    assert CheckpointSource(directory).note == ""
    save_file(held | {"lm_head.weight": held["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(
        ConvertError, match=r"lm_head\.weight\] expected the token table, as tie_word_embeddings"
    ):
        CheckpointSource(directory)


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("llama", "is_causal", False),
        ("qwen2", "is_causal", False),
        ("qwen3", "use_bidirectional_attention", True),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma4", "use_bidirectional_attention", "all"),
    ],
)
def test_attention_that_is_not_causal(model_type: str, field: str, value: object, tiny: Tiny) -> None:
    directory = with_tensors(tiny(model_type), {}, **{field: value})
    with pytest.raises(ConvertError, match=rf"\[config\.json\] expected {field} None .*; got {value}"):
        CheckpointSource(directory)
