"""Bad files as a user meets them: of every command one line on standard error, exit status 2, and nothing
left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import plain, rewritten
from tiny_models import TINY

from conftest import TEXT, Tiny
from latentkv.cli import main
from latentkv_convert.source import archs

pytest.importorskip("latentkv._core", reason="needs the native module (pip install .)")

Make = Callable[[Path, Path], Path]  # a stock file and a folder -> the bad file there


@pytest.fixture(scope="module")
def stock(random_checkpoint: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """stock("llama"): a plain GGUF of random weights."""
    made: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in made:
            folder = tmp_path_factory.mktemp("stock")
            directory = random_checkpoint(folder / "tiny", model_type)
            made[model_type] = plain(directory, folder / "stock.gguf")
        return made[model_type]

    return make


def without(*names: str) -> Make:
    return lambda source, folder: rewritten(source, folder / "bad.gguf", without=names)


def strange(source: Path, folder: Path) -> Path:
    """An architecture nobody has, and none of llama's keys."""
    names = [f"llama.{key}" for key in ("block_count", "context_length", "attention.head_count")]
    keys = {"general.architecture": "plamo"}
    return rewritten(source, folder / "bad.gguf", without=tuple(names), keys=keys)


def cut(share: float) -> Make:
    def make(source: Path, folder: Path) -> Path:
        whole = source.read_bytes()
        (folder / "bad.gguf").write_bytes(whole[: int(share * len(whole))])
        return folder / "bad.gguf"

    return make


def one_part_less(source: Path, folder: Path) -> Path:
    first = rewritten(source, folder / "bad.gguf", per_part=12)
    first.with_name(first.name.replace("-00001-", "-00002-")).unlink()
    return first


def sidecar(source: Path, folder: Path) -> Path:
    path = folder / "bad.gguf"
    assert main(["convert", str(source), "-o", str(path), "--method", "lorc", "--no-plot", "--sidecar"]) == 0
    path.with_suffix(".report.json").unlink()
    return path


def not_causal(source: Path, folder: Path) -> Path:
    """An embedding model, whose tokens see those behind them."""
    return rewritten(source, folder / "bad.gguf", keys={"llama.attention.causal": False})


CASES = [
    (
        "llama",
        not_causal,
        "[bad.gguf] expected attention.causal True; got False",
        "[llama.attention.causal] expected true: tokens see those before them; got false",
    ),
    ("llama", without("tokenizer.ggml.model"), "expected a vocabulary (tokenizer.ggml.model); got none", ""),
    ("llama", strange, "; got plamo", "; got 'plamo'"),
    ("llama", cut(0.0), "expected a GGUF; got an empty file", "expected a GGUF; got an empty file"),
    ("llama", cut(0.02), "(truncated?)", "(truncated?)"),
    ("llama", cut(0.7), "(truncated?)", "(truncated?)"),
    (
        "qwen3_moe",
        without("blk.1.ffn_up_exps.weight"),
        "expected a tensor blk.1.ffn_up_exps.weight; got none among 26 tensors",
        "expected a tensor blk.1.ffn_up_exps.weight; got none",
    ),
    (
        "qwen3_moe",
        without("blk.0.ffn_gate_inp.weight"),
        "expected a tensor blk.0.ffn_gate_inp.weight; got none among 26 tensors",
        "expected a tensor blk.0.ffn_gate_inp.weight; got none",
    ),
    ("llama", one_part_less, "bad-00002-of-00003.gguf'", "bad-00002-of-00003.gguf'"),
    (
        "llama",
        sidecar,
        "expected full K and V; got a latent cache (latentkv.base.hash); convert what it was made of",
        "expected 'stock.gguf' as the model, with --latent (latent_path)",
    ),
]


@pytest.mark.parametrize(("model_type", "make", "of_convert", "of_runtime"), CASES)
def test_every_command_refuses_it(
    model_type: str,
    make: Make,
    of_convert: str,
    of_runtime: str,
    stock: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = make(stock(model_type), tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    written = ["convert", str(bad), "-o", str(tmp_path / "out.gguf"), "--calib", str(text)]
    commands = [
        ([*written, "--kv-budget", "14%"], of_convert),
        ([*written, "--kv-budget", "14%", "--sidecar"], of_convert),
        (["chat", str(bad), "-p", "hello", "-n", "1"], of_runtime or "expected tokenizer.* keys in"),
        (["perplexity", str(bad), "-f", str(text)], of_runtime or "expected tokenizer.* keys in"),
    ]
    if of_runtime:  # what needs no vocabulary
        commands += [
            (["info", str(bad)], of_runtime),
            (["bench", str(bad), "-p", "1", "-n", "1"], of_runtime),
        ]

    def left() -> list[str]:
        """But for the cache, in which matplotlib lists fonts."""
        return sorted(path.name for path in tmp_path.iterdir() if path.name != "cache")

    before = left()
    capsys.readouterr()
    for command, message in commands:
        assert main(command) == 2, command
        said = capsys.readouterr()
        assert said.out == ""
        assert len(said.err.splitlines()) == 1, said.err
        assert said.err.startswith("error: [")
        assert message in said.err
        assert left() == before


def test_known_architectures_are_all_named(
    stock: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = strange(stock("llama"), tmp_path)
    for command in (
        ["convert", str(bad), "-o", str(tmp_path / "x.gguf"), "--method", "none"],
        ["info", str(bad)],
    ):
        assert main(command) == 2
        line = capsys.readouterr().err
        files = {archs.model_spec(TINY[name]).gguf_arch for name in archs.names()}
        assert not {name for name in files if f"{name}," not in line and f"{name};" not in line}
