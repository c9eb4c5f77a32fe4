"""A sidecar beside its base is the file in one piece, bit for bit, and beside any other it is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both import core, session, token_ids
from gguf_files import offset, plain, rewritten
from test_gguf_source import CALIBRATED, K_QUANTS, WATERFILL, WIDE, converted, tensor_bytes

from conftest import Tiny
from latentkv_convert.cli import main
from latentkv_convert.source.gguf_file import GgufFile

PALU = ["--method", "palu", *CALIBRATED]
Pair = tuple[Path, Path, Path]  # base, sidecar, file in one piece


def made(base: Path, room: Path, calib: Path, *options: str) -> Pair:
    whole = converted(base, room / "whole.gguf", calib, *options)
    return base, converted(base, room / "side.gguf", calib, "--sidecar", *options), whole


@pytest.fixture
def pair(tiny: Tiny, calib: Path, tmp_path: Path) -> Pair:
    source = rewritten(plain(tiny(**WIDE), tmp_path / "plain.gguf"), tmp_path / "base.gguf", K_QUANTS)
    return made(source, tmp_path, calib, *WATERFILL, "--master")


@pytest.mark.parametrize(
    ("model_type", "config", "types", "options"),
    [
        ("llama", WIDE, K_QUANTS, WATERFILL),
        ("llama", WIDE, K_QUANTS, PALU),
        ("qwen2", {}, {}, PALU),
        ("qwen3", {}, {"ffn_up.weight": "q8_0"}, WATERFILL),
        ("olmo2", {}, {"attn_k.weight": "q8_0"}, PALU),
        ("phi3", {"rope_scaling": None}, {"attn_qkv.weight": "q8_0"}, PALU),
        ("phi3", {}, {"attn_qkv.weight": "q4_0"}, WATERFILL),
        ("phi3", {}, {}, ["--method", "tale", *CALIBRATED]),
        ("falcon", {"multi_query": False, "bias": True}, {}, PALU),
        ("opt", {}, {}, WATERFILL),
        ("mpt", {}, {}, PALU),
    ],
    ids=str,
)
def test_equals_the_file_in_one_piece(
    model_type: str,
    config: dict[str, Any],
    types: dict[str, str],
    options: list[str],
    tiny: Tiny,
    calib: Path,
    tmp_path: Path,
) -> None:
    stock = plain(tiny(model_type, **config), tmp_path / "plain.gguf")
    base, side, whole = made(rewritten(stock, tmp_path / "base.gguf", types), tmp_path, calib, *options)
    added, held, together = (tensor_bytes(path) for path in (side, base, whole))
    assert added
    assert added.items() <= together.items()
    other = {name.split(".", 2)[2] for name in added.keys() & held.keys()}
    assert other <= {"attn_k.bias", "attn_v.bias"}  # which take up the mean of what is cached
    assert not {name for name in added if name.split(".", 2)[2] in ("attn_q.weight", "attn_q.bias")}
    ours = {key: value for key, value in GgufFile(whole).values.items() if key.startswith("latentkv.")}
    assert ours.items() <= GgufFile(side).values.items()
    beside, one = core.Model(str(base), latent_path=str(side)), core.Model(str(whole))
    assert beside.layers == one.layers
    assert beside.size_bytes == one.size_bytes
    assert beside.n_params == one.n_params
    ids = token_ids(100)
    got, expected = (session(model, kv="").decode(ids, output="all") for model in (beside, one))
    assert np.isfinite(expected).all()
    assert got.tobytes() == expected.tobytes()


def test_a_master_is_planned_anew(pair: Pair) -> None:
    from latentkv.plan.master import planned

    base, side, whole = pair
    ids = token_ids(160)
    beside, one = core.Model(str(base), latent_path=str(side)), core.Model(str(whole))
    rows = []
    for budget in ("25%", "60%"):
        for model in (beside, one):
            options = planned(model, {"kv_budget": budget})
            live = core.Session(model, n_ctx=256, n_threads=1, **options)
            rows.append(np.concatenate([live.decode(ids[i : i + 8]) for i in range(0, len(ids), 8)]))
    assert rows[0].tobytes() == rows[1].tobytes()
    assert rows[2].tobytes() == rows[3].tobytes() != rows[0].tobytes()


def test_llama_and_every_command_take_both(
    pair: Pair, room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from latentkv import Llama
    from latentkv.cli import main as command

    base, side, whole = (str(path) for path in pair)
    said = []
    for path, latent in ((base, side), (whole, None)):
        with Llama(path, latent_path=latent, n_ctx=256) as llama:
            said.append((llama("The sea", max_tokens=8, temperature=0)["choices"], llama.kv_bytes()))
    assert said[0] == said[1]
    capsys.readouterr()
    results = []
    for options in ([base, "--latent", side], [whole]):
        assert command(["info", *options, "--json", "-c", "256"]) == 0
        info = json.loads(capsys.readouterr().out)
        info["file"].pop("path"), info["file"].pop("sidecar")
        score = [
            "perplexity",
            *options,
            "-f",
            str(room / "calib.txt"),
            "-c",
            "64",
            "--chunks",
            "2",
            "-t",
            "1",
        ]
        assert command([*score, "--json"]) == 0
        results.append((info, json.loads(capsys.readouterr().out)["ppl"]))
        assert command(["bench", *options, "-p", "8", "-n", "1", "-r", "1", "-t", "1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["latent"] == (side if "--latent" in options else None)
        assert command(["chat", *options, "-p", "x", "-n", "2", "--raw", "-c", "64"]) == 0
        capsys.readouterr()
    assert results[0] == results[1]


def documented_hash(path: Path) -> str:
    """docs/gguf.md, Sidecars, word for word."""
    file, entries = GgufFile(path), {}
    architecture = file.values["general.architecture"].data.decode()
    for key, value in file.values.items():
        own = key == "general.architecture" or key.startswith((f"{architecture}.", "latentkv.block."))
        if own or key.startswith("latentkv.rope."):
            entries[key] = raw_entry(path, key, value)
    digest = hashlib.sha256(text("latentkv base 1"))
    for key in sorted(entries):
        digest.update(entries[key])
    for name in sorted(file.tensors):
        info, data = file.tensors[name], file.raw(name).tobytes()
        ne = [*reversed(info.shape), 1, 1, 1][:4]
        number = {"f32": 0, "f16": 1, "q4_1": 3, "q8_0": 8, "q4_k": 12, "q6_k": 14}[info.type]
        digest.update(text(name) + struct.pack("<I4q", number, *ne))
        if len(data) <= 8 * 4096:
            digest.update(data)
        else:
            for i in range(8):
                at = i * (len(data) - 4096) // 7
                digest.update(data[at : at + 4096])
    return digest.hexdigest()


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word.encode())) + word.encode()


def raw_entry(path: Path, key: str, value: Any) -> bytes:
    """As it lies in the file: strings and numbers of 4 bytes, and flags."""
    data = path.read_bytes()
    at = data.index(text(key))
    assert value.type in (4, 5, 6, 7, 8)
    size = {7: 1, 8: 8 + len(value.data) if value.type == 8 else 0}.get(value.type, 4)
    return data[at : at + len(text(key)) + 4 + size]


def test_the_hash_is_the_documented_one(pair: Pair, tiny: Tiny, tmp_path: Path) -> None:
    base, side, _ = pair
    assert GgufFile(side).values["latentkv.base.hash"].data.decode() == documented_hash(base)
    assert max(info.n_bytes for info in GgufFile(base).tensors.values()) > 8 * 4096
    ours = tmp_path / "ours.gguf"  # with a block description
    assert main([str(tiny(name="other")), "-o", str(ours), "--method", "none"]) == 0
    assert core.content_hash(str(ours)) == documented_hash(ours)


def test_what_the_base_may_say_otherwise(pair: Pair, tmp_path: Path) -> None:
    """Names and chat templates are not hashed; hyperparameters and weights are."""
    base, side, _ = pair
    told = {"tokenizer.chat_template": "{{ messages }}", "general.name": "renamed"}
    core.Model(str(rewritten(base, tmp_path / "renamed.gguf", keys=told)), latent_path=str(side))
    turned = rewritten(base, tmp_path / "turned.gguf", keys={"llama.rope.freq_base": 5e5})
    changed = tmp_path / "changed.gguf"
    shutil.copy(base, changed)
    name = "blk.1.ffn_down.weight"
    with changed.open("r+b") as file:
        file.seek(offset(changed, name) + GgufFile(changed).info(name).n_bytes - 1)
        last = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([last ^ 1]))
    for other in (turned, changed):
        with pytest.raises(
            ValueError, match=r"^\[--latent\] expected 'base.gguf' \(hash '[0-9a-f]{12}'\) as"
        ):
            core.Model(str(other), latent_path=str(side))


def test_refusals_are_one_line(pair: Pair, calib: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from latentkv.cli import main as command

    base, side, whole = (str(path) for path in pair)
    for options, message in (
        (
            [side],
            f"expected 'base.gguf' as the model, with --latent (latent_path) '{side}'; got this sidecar",
        ),
        ([base, "--latent", base], f"got '{base}', which is none: open it as the model"),
        ([base, "--latent", whole], f"got '{whole}', which is none: open it as the model"),
        ([whole, "--latent", side], f"got '{whole}', which has a latent cache of its own"),
        ([side, "--latent", side], f"got '{side}', a sidecar too"),
    ):
        for name in (["info"], ["chat", "-p", "x"], ["bench"], ["perplexity", "-f", str(calib)]):
            capsys.readouterr()
            assert command([name[0], *options, *name[1:]]) == 2
            lines = capsys.readouterr().err.splitlines()
            assert len(lines) == 1
            assert lines[0].startswith("error: [--latent] expected")
            assert message in lines[0]


def test_a_base_in_parts_is_the_base_in_one_file(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    stock = plain(tiny(), tmp_path / "plain.gguf")
    parts = rewritten(stock, tmp_path / "split.gguf", per_part=14)
    side = converted(parts, tmp_path / "side.gguf", calib, "--sidecar", *PALU)
    together = core.Model(str(converted(stock, tmp_path / "whole.gguf", calib, *PALU)))
    ids = token_ids(40)
    expected = session(together, kv="").decode(ids, output="all")
    for base in (parts, stock):
        beside = core.Model(str(base), latent_path=str(side))
        assert beside.size_bytes == together.size_bytes
        assert session(beside, kv="").decode(ids, output="all").tobytes() == expected.tobytes()


def test_a_conversion_that_makes_none_is_refused(
    pair: Pair, tiny: Tiny, calib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, side, _ = pair
    checkpoint = tiny(name="directory")
    out = tmp_path / "out.gguf"
    for source, options, message in (
        (
            checkpoint,
            [],
            "[--sidecar] expected a GGUF, whose weights the runtime opens beside the sidecar; got",
        ),
        (
            base,
            ["--outtype", "q8_0"],
            "[--sidecar] expected weights that stay in the GGUF; got --outtype q8_0",
        ),
        (base, ["--method", "none"], "[--sidecar] expected a method that makes factors; got --method none"),
        (side, [], "[side.gguf] expected full K and V; got a latent cache"),
    ):
        capsys.readouterr()
        calibrated = [] if "none" in options else ["--calib", str(calib), *WATERFILL]
        assert main([str(source), "-o", str(out), "--sidecar", *calibrated, *options]) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()
