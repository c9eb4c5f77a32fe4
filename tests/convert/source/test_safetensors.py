"""Headers of .safetensors files come from strangers: a damaged one is refused in one line, before any byte
behind it is taken for a weight."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Tiny
from latentkv_convert.cli import main
from latentkv_convert.errors import ConvertError
from latentkv_convert.source.checkpoint import Checkpoint
from latentkv_convert.source.safetensors_file import SafetensorsFile

Header = dict[str, Any]
DATA = np.arange(16, dtype=np.float32)
GOOD: Header = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    "b": {"dtype": "F32", "shape": [8], "data_offsets": [32, 64]},
}


def packed(header: bytes, data: bytes = DATA.tobytes(), length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(**changed: Any) -> bytes:
    """The good header with other fields of b; None takes one away."""
    fields = {name: value for name, value in {**GOOD["b"], **changed}.items() if value is not None}
    return json.dumps({**GOOD, "b": fields}).encode()


def test_a_good_header(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(packed(json.dumps(GOOD).encode() + b"   "))  # padded, as some write it
    file = SafetensorsFile(tmp_path / "f")
    assert sorted(file.names()) == ["a", "b"]
    assert np.array_equal(file.read("a"), DATA[:8].reshape(2, 4))
    assert np.array_equal(file.read("b"), DATA[8:])


DAMAGED = {
    "nothing": b"",
    "a length beyond the file": packed(b"{}", length=100),
    "a huge length": packed(b"{}", length=(1 << 64) - 1),
    "no JSON": packed(b"{]"),
    "no UTF-8": packed(b'{"\xff": 1}'),
    "brackets without end": packed(b"[" * 100_000),
    "values that are too deep": packed(b'{"b": {"more": ' + b"[" * 10_000 + b"]" * 10_000 + b"}}"),
    "a list": packed(b"[]"),
    "a name twice": packed(entry()[:-1] + b', "b": ' + json.dumps(GOOD["a"]).encode() + b"}"),
    "notes that are none": packed(b'{"__metadata__": 3}'),
    "an entry that is a number": packed(b'{"b": 1}'),
    "no dtype": packed(entry(dtype=None)),
    "no shape": packed(entry(shape=None)),
    "no offsets": packed(entry(data_offsets=None)),
    "an unknown dtype": packed(entry(dtype="F7")),
    "a dtype that is a list": packed(entry(dtype=[])),
    "a shape that is text": packed(entry(shape="8")),
    "a negative shape": packed(entry(shape=[-2, -4])),
    "a shape of booleans": packed(entry(shape=[True, 8])),
    "another shape": packed(entry(shape=[9])),
    "a shape that overflows": packed(entry(shape=[1 << 62, 4])),
    "offsets that are text": packed(entry(data_offsets=["a", "b"])),
    "one offset": packed(entry(data_offsets=[32])),
    "a negative offset": packed(entry(data_offsets=[-8, 24])),
    "offsets the wrong way": packed(entry(data_offsets=[64, 32])),
    "bytes beyond the file": packed(entry(data_offsets=[64, 96])),
    "bytes of another": packed(entry(data_offsets=[16, 48])),
    "bytes of nobody": packed(json.dumps(GOOD).encode(), bytes(68)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_header(tmp_path: Path, damage: str) -> None:
    (tmp_path / "f").write_bytes(DAMAGED[damage])
    wanted = r"^\[f\] expected a whole safetensors file; got SafetensorError: .{10}"
    with pytest.raises(ConvertError, match=wanted) as refused:
        SafetensorsFile(tmp_path / "f")
    assert "\n" not in str(refused.value)


def test_a_file_larger_than_memory(tmp_path: Path) -> None:
    size = 1 << 40  # sparse
    large = {"dtype": "BF16", "shape": [size >> 13, 1 << 12], "data_offsets": [0, size]}
    small = {"dtype": "F32", "shape": [16], "data_offsets": [size, size + 64]}
    with (tmp_path / "f").open("wb") as out:
        out.write(packed(json.dumps({"large": large, "small": small}).encode(), b""))
        out.seek(size, 1)
        out.write(DATA.tobytes())
    file = SafetensorsFile(tmp_path / "f")
    assert file.shape("large") == (size >> 13, 1 << 12)
    assert np.array_equal(file.read("small"), DATA)


def test_a_name_is_no_line_and_no_command_of_a_terminal(tmp_path: Path) -> None:
    header = json.dumps({"x\n\x1b[2Jerror: fine": 1}).encode()
    (tmp_path / "f").write_bytes(packed(header))
    with pytest.raises(ConvertError) as refused:
        SafetensorsFile(tmp_path / "f")
    assert "\n" not in str(refused.value)
    assert "\x1b" not in str(refused.value)


def test_the_command_says_it_in_one_line(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tiny()
    capsys.readouterr()
    for damage, data in DAMAGED.items():
        (directory / "model.safetensors").write_bytes(data)
        assert main([str(directory), "-o", str(tmp_path / "o.gguf"), "--method", "none"]) == 2, damage
        said = capsys.readouterr().err
        assert said.startswith("error: [model.safetensors"), (damage, said)
        assert said.count("\n") == 1


INDEXES: dict[str, tuple[Callable[[Header], Any], str]] = {
    "a list": (lambda index: [], "expected a weight_map; got none"),
    "no map": (lambda index: {}, "expected a weight_map; got none"),
    "a map of numbers": (
        lambda index: {"weight_map": {"a": 1}},
        "expected a weight_map of tensors' and files'",
    ),
    "a folder above": (lambda index: {"weight_map": {"a": "../x.safetensors"}}, "got no such file"),
    "a path from the root": (lambda index: {"weight_map": {"a": "/etc/passwd"}}, "got no such file"),
    "a shard that is missing": (lambda index: {"weight_map": {"a": "x.safetensors"}}, "got no such file"),
    "a shard that is a folder": (lambda index: {"weight_map": {"a": "."}}, "got no such file"),
    "an empty name": (lambda index: {"weight_map": {"a": ""}}, "got no such file"),
}


@pytest.mark.parametrize("damage", INDEXES)
def test_a_damaged_index(tiny: Tiny, damage: str) -> None:
    directory = tiny(shard_size="100KB")
    index = directory / "model.safetensors.index.json"
    change, message = INDEXES[damage]
    index.write_text(json.dumps(change(json.loads(index.read_text()))))
    with pytest.raises(ConvertError, match=message):
        Checkpoint(directory)


def test_json_files_may_begin_with_a_mark(tiny: Tiny) -> None:
    directory = tiny()
    config = directory / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert Checkpoint(directory).config["model_type"] == "llama"
