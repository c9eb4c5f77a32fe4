"""GGUFs that tests write: a plain one of a random checkpoint, and the same in other types or in parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from latentkv_convert.cli import main
from latentkv_convert.source.gguf_file import GgufFile

Types = Mapping[str, str]  # end of a tensor's name -> type
_HEAD = {"q4_k": 2, "q6_k": 0}  # f16 numbers at the start of a block
_TAIL = {"q4_k": 0, "q6_k": 1}  # and at its end


def plain(checkpoint: Path, out: Path, outtype: str = "f32") -> Path:
    """As llama.cpp's converter writes it, and without a key of ours."""
    assert main([str(checkpoint), "-o", str(out), "--method", "none", "--outtype", outtype]) == 0
    return rewritten(out, out)


def older_mla(path: Path, out: Path, kind: str = "f32") -> Path:
    """A deepseek2 file as converters wrote it until May 2025: both factors of a layer in attn_kv_b, and heads
    as long as they are without absorbing them."""
    source = GgufFile(path)
    of = "deepseek2.attention."
    number = {
        name: source.values[of + name].data for name in ("head_count", "key_length_mla", "value_length_mla")
    }
    both, without = {}, [of + "key_length_mla", of + "value_length_mla"]
    for name, info in source.tensors.items():
        if not name.endswith("attn_k_b.weight"):
            continue
        values = name.replace("attn_k_b", "attn_v_b")
        of_keys, of_values = (
            source.raw(own).view(np.float32).reshape(source.tensors[own].shape) for own in (name, values)
        )
        heads = np.concatenate([of_keys.transpose(0, 2, 1), of_values], axis=1)
        both[name.replace("attn_k_b", "attn_kv_b")] = heads.reshape(-1, info.shape[1])
        without += [name, values]
    keys = {
        of + "key_length": number["key_length_mla"],
        of + "value_length": number["value_length_mla"],
        of + "head_count_kv": number["head_count"],
    }
    if kind == "f32":
        return rewritten(path, out, without=tuple(without), keys=keys, extra=both)
    whole = rewritten(path, out.with_suffix(".f32"), without=tuple(without), keys=keys, extra=both)
    return rewritten(whole, out, types={"attn_kv_b.weight": kind})


def rewritten(
    path: Path,
    out: Path,
    types: Types | None = None,
    without: tuple[str, ...] = (),
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None,
    per_part: int = 0,
) -> Path:
    """The file with some tensors in another type (random weights where gguf has no quantizer), without some
    keys and tensors, with others, in parts of `per_part` tensors. Returns the (first) file."""
    source = GgufFile(path)
    values = {key: value for key, value in source.values.items() if not key.startswith("latentkv.")}
    own = values.pop("general.architecture").plain()
    keys = dict(keys or {})
    architecture = keys.pop("general.architecture", own)
    data = {name: source.raw(name).copy() for name in source.tensors}
    writer = gguf.GGUFWriter(out, architecture, split_max_tensors=per_part)
    for key, value in values.items():
        if key not in {*without, *keys}:
            sub_type = None if value.sub_type is None else gguf.GGUFValueType(value.sub_type)
            writer.add_key_value(key, value.data, gguf.GGUFValueType(value.type), sub_type=sub_type)
    for key, value in keys.items():
        kind = gguf.GGUFValueType.get_type(value)
        if type(value) is int and value >= 0 and key in values and values[key].sub_type is None:
            kind = gguf.GGUFValueType(values[key].type)  # readers want the type that they know
        writer.add_key_value(key, value, kind)
    rng = np.random.default_rng(0)
    for name, info in source.tensors.items():
        if name in without:
            continue
        kind = next((t for end, t in (types or {}).items() if name.endswith(end)), info.type)
        raw = data[name] if kind == info.type else encoded(data[name].view(np.float32), kind, rng)
        qtype = gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor(name, raw.reshape(*info.shape[:-1], -1), raw_dtype=qtype)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file(out)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(out.parent.glob(f"{out.stem}-*-of-*.gguf"))
    return parts[0] if per_part else out


def offset(path: Path, name: str) -> int:
    """Of a tensor's bytes in the file."""
    return next(int(each.data_offset) for each in gguf.GGUFReader(path).tensors if each.name == name)


def encoded(weights: NDArray[np.float32], kind: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """[rows, bytes of a row]"""
    qtype = gguf.GGMLQuantizationType[kind.upper()]
    if kind not in _HEAD:
        return np.asarray(gguf.quants.quantize(weights, qtype)).view(np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    blocks = rng.integers(0, 256, (weights.size // block, size), dtype=np.uint8)
    for n, at in ((_HEAD[kind], 0), (_TAIL[kind], size - 2 * _TAIL[kind])):
        scales = rng.uniform(0.5, 1.5, (len(blocks), n)) * {"q4_k": 2e-4, "q6_k": 2e-5}[kind]
        blocks[:, at : at + 2 * n] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(weights.shape[0], -1)
