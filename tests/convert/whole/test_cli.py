"""Bad input gives one line, exit status 2 and no file; Ctrl-C gives 130."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TINY

from conftest import ROOT, TEXT, tensors
from latentkv_convert import cli, report
from latentkv_convert.calibrate import sample
from latentkv_convert.calibrate.saved import store
from latentkv_convert.errors import ConvertError
from latentkv_convert.source import archs
from latentkv_convert.weights.encoding import Encoding
from latentkv_convert.weights.mixes import Mix
from latentkv_convert.write import gguf_write

Tiny = Callable[..., Path]
SCRIPT = ROOT / "tools" / "convert" / "convert_lowrank.py"


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], out: Path) -> str:
    """Runs the converter, checks the manners of its refusal, and returns the line."""
    capsys.readouterr()  # what building the checkpoint printed
    assert cli.main([*arguments, "-o", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: [")
    assert "expected" in lines[0]
    assert "; got" in lines[0]
    assert not [path for path in out.parent.glob("*") if path.name.startswith(out.name)]
    return lines[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", "0"], "[--keep] expected a fraction above 0 and at most 1; got 0"),
        (["--keep", "1.5"], "[--keep] expected a fraction above 0 and at most 1; got 1.5"),
        (["--keep", "nan"], "got nan"),
        (["--keep", "half"], "got half"),
        (["--keep", "0.01"], "[--keep] expected at least 0.5 (rank 16 in every group); got 0.01"),
        (["--group", "3"], "[--group] expected a divisor of the model's 2 KV heads (1, 2) or all; got 3"),
        (["--group", "4"], "got 4"),
        (["--group", "0"], "got 0"),
        (["--method", "svd"], "[--method] expected one of"),
        (
            ["--method", "none", "--keep", "0.5"],
            "[--keep] expected a method of eigen, lorc, palu, tale, zack;",
        ),
        (["--method", "palu", "--quick"], "[--quick] expected --method waterfill; got --method palu"),
        (["--method", "waterfill", "--kv-budget", "101%"], "[--kv-budget] expected a share such as 14%"),
        (
            ["--method", "palu", "--device", "mps"],
            "[--device] expected a device that torch can use; got mps (",
        ),
        (["--allocate", "magic"], "[--allocate] expected one of"),
        (["--basis", "fancy"], "[--basis] expected one of"),
        (["--outtype", "q3"], "[--outtype] expected one of"),
        (["--seed", "-1"], "[--seed] expected a whole number from 0; got -1"),
        (["--calib-tokens", "0"], "[--calib-tokens] expected a whole number above 0; got 0"),
        (
            ["--device", "warp"],
            "[--device] expected cpu, cuda, mps or xpu, or one of several as cuda:1; got warp",
        ),
        (["--device", "cuda:99"], "[--device] expected a device that torch can use; got cuda:99"),
        (["--method", "lorc", "--device", "meta"], "[--device] expected cpu, cuda, mps or xpu"),
        (
            ["--method", "lorc", "--calib", "nofile"],
            "[--calib] expected a readable text file at nofile; got No",
        ),
        (
            ["--method", "none", "--calib", "."],
            "[--calib] expected a readable text file at .; got a directory",
        ),
        (
            ["--method", "lorc", "--finetune", "nofile"],
            "[--finetune] expected a readable text file at nofile; got No",
        ),
        (["--nonsense"], "got --nonsense"),
    ],
)
def test_bad_options(
    tiny: Tiny,
    tmp_path: Path,
    calib: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    arguments = [str(tiny()), "--group", "1", "--calib-tokens", "512", "--fisher-tokens", "256"]
    if "--method" not in options:
        arguments += ["--method", "palu", "--calib", str(calib)]
    else:
        arguments = [arguments[0]]
    assert message in refused(capsys, [*arguments, *options], tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--kv-budget", "14"],
            "[--kv-budget] expected a share such as 14%, or bytes at a context such as 2.5GiB@131072; got 14",
        ),
        (["--kv-budget", "1%"], "[--kv-budget] expected more than"),
        (["--prefer", "both"], "[--prefer] expected one of"),
        (["--sink", "-1"], "[--sink] expected a whole number from 0 to 65536; got -1"),
        (
            ["--served-context", "100"],
            "[--served-context] expected more than sink 4 and recent 128 together; got 100",
        ),
        (
            ["--calib-window", "100"],
            "[--calib-window] expected windows longer than sink 4 and recent 128 together",
        ),
        (["--keep", "0.5"], "[--keep] expected --kv-budget SIZE, or a method that keeps a share"),
        (["--keep=0.5"], "(--method palu); got --method waterfill"),
        (["--sink", "65537"], "[--sink] expected a whole number from 0 to 65536; got 65537"),
        (["--recent", "1048577"], "[--recent] expected a whole number from 0 to 1048576; got 1048577"),
        (
            ["--served-context", "99999999999"],
            "[--served-context] expected a whole number from 1 to 268435456",
        ),
    ],
)
def test_bad_budgets(
    tiny: Tiny,
    tmp_path: Path,
    calib: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    """Of the default method."""
    assert message in refused(capsys, [str(tiny()), "--calib", str(calib), *options], tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("method", "option", "highest"),
    [
        ("tale", "--sink", 1 << 16),
        ("tale", "--recent", 1 << 20),
        ("zack", "--served-context", 1 << 28),
    ],
)
def test_numbers_that_no_runtime_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, method: str, option: str, highest: int
) -> None:
    arguments = ["checkpoint", "--method", method, option]
    assert f"to {highest}; got 99999999999" in refused(
        capsys, [*arguments, "99999999999"], tmp_path / "out.gguf"
    )
    name = option.removeprefix("--").replace("-", "_")
    assert cli.parse([*arguments, str(highest), "-o", "x"], "test").options[name] == highest


@pytest.mark.parametrize(
    ("model_type", "field", "value", "message"),
    [
        ("llama", "num_attention_heads", 0, "num_attention_heads from 1 to 4096; got 0"),
        ("llama", "num_key_value_heads", 0, "num_key_value_heads from 1 to 4096; got 0"),
        ("llama", "num_hidden_layers", 0, "num_hidden_layers from 1 to 4096; got 0"),
        ("llama", "hidden_size", 2.5, "hidden_size from 1 to 1048576; got 2.5"),
        ("llama", "max_position_embeddings", 0, "max_position_embeddings from 1 to 1073741824; got 0"),
        ("llama", "max_position_embeddings", 99999999999, "from 1 to 1073741824; got 99999999999"),
        ("llama", "rms_norm_eps", float("nan"), "rms_norm_eps from 0 to 1; got nan"),
        ("llama", "rms_norm_eps", -1e-5, "rms_norm_eps from 0 to 1; got -1e-05"),
        ("llama", "head_dim", 31, "RoPE over an even number of a head's 31 dimensions; got 31"),
        ("llama", "rope_theta", 0, "[rope] expected rope_theta from 1 to 1e+15; got 0"),
        ("llama", "rope_theta", 1e39, "[rope] expected rope_theta from 1 to 1e+15; got 1e+39"),
        ("llama", "rope_scaling", {"rope_type": "banana"}, "[rope] expected rope_type default, linear,"),
        ("llama", "rope_scaling", {"rope_type": "linear", "factor": 0}, "factor from 0.001 to 1e+06; got 0"),
        ("mpt", "n_heads", 0, "n_heads from 1 to 4096; got 0"),
        ("mpt", "d_model", 97, "a width divisible by its 3 query heads; got 97"),
        ("mpt", "n_layers", 5000, "n_layers from 1 to 4096; got 5000"),
        ("mpt", "layer_norm_epsilon", -1, "layer_norm_epsilon from 0 to 1; got -1"),
        ("opt", "max_position_embeddings", 99999999999, "max_position_embeddings from 1 to"),
        ("falcon", "num_attention_heads", 0, "num_attention_heads from 1 to 4096; got 0"),
    ],
)
def test_config_values_that_no_runtime_takes(model_type: str, field: str, value: Any, message: str) -> None:
    config = TINY[model_type]
    archs.model_spec(config)
    with pytest.raises(ConvertError) as refusal:
        archs.model_spec(config | {field: value})
    assert message in str(refusal.value)


def test_spellings_of_llama_cpp() -> None:
    recipe = cli.parse(["source", "--outfile", "x.gguf", "--outtype", "Q4_K_M"], "test")
    assert (recipe.output, recipe.outtype) == (Path("x.gguf"), "q4_k_m")
    assert cli.parse(["source", "--outfile=x.gguf"], "test").output == Path("x.gguf")


def test_several_texts_are_one(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path in paths:
        path.write_text(path.name)
    words = [word for path in paths for word in ("--calib", str(path))]
    recipe = cli.parse(["source", "-o", "x", *words], "test")
    assert recipe.calib == tuple(paths)
    assert sample.read_texts(recipe.calib) == "a.txt\n\nb.txt"
    paths[1].write_text(" ")
    with pytest.raises(ConvertError, match=r"got an empty file b\.txt"):
        sample.read_texts(recipe.calib)


def test_a_forecast_that_nothing_measured_says_so(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "short.txt"
    text.write_text(TEXT[:700], encoding="utf-8")
    words = ["--calib", str(text), "--recent", "16", "--no-plot", "--no-cache"]
    assert cli.main([str(tiny()), "-o", str(tmp_path / "out.gguf"), *words]) == 0
    out, err = capsys.readouterr()
    assert err.count("warning: [--calib] expected two windows of ") == 1
    assert "nats per token (predicted, not measured: more is lost)" in out


def test_the_environment_of_a_notebook() -> None:
    code = "from latentkv_convert import pictures; pictures.check_plot()"
    environment = os.environ | {"MPLBACKEND": "none such", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


def test_a_cache_folder_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for base in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert store.cache_root() == tmp_path / ".cache/latentkv"


def test_an_output_that_no_runtime_could_open(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refused(capsys, ["source"], tmp_path / "a\udcff.gguf")
    assert line.startswith("error: [-o] expected UTF-8; got byte 0xff at offset ")


def test_missing_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    line = "error: [latentkv convert] expected -o/--output; got none; see latentkv convert --help\n"
    assert capsys.readouterr().err == line


def test_bad_checkpoints(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.gguf"

    def line(directory: Path) -> str:
        return refused(capsys, [str(directory), "--method", "none"], out)

    assert "[source] expected a checkpoint directory or a GGUF at" in line(tmp_path / "nowhere")
    for text, why in (
        ("x", "got a file of 1 bytes (truncated?)"),
        ("a text", "expected a file that begins with GGUF; got 'a te'"),
    ):
        (tmp_path / "file").write_text(text)
        assert why in line(tmp_path / "file")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "expected a file config.json" in line(empty)
    (empty / "config.json").write_text("{")
    assert "expected JSON in" in line(empty)
    (empty / "config.json").write_text('{"model_type": "llama"}')
    assert "expected model.safetensors, pytorch_model.bin" in line(empty)

    directory = tiny()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert "[architecture] expected a model_type of" in line(directory)
    (directory / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "rms_norm_eps"})
    )
    assert "[config.json] expected the field rms_norm_eps; got none" in line(directory)
    (directory / "config.json").write_text(json.dumps(config | {"hidden_act": "snake"}))
    assert "expected an activation of" in line(directory)
    (directory / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    assert "query heads divisible by KV heads; got 4 and 3" in line(directory)
    (directory / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    assert "k_proj.weight] expected shape [128, 96] from config.json; got [64, 96]" in line(directory)


@pytest.mark.parametrize(
    ("model_type", "changed", "message"),
    [
        ("llama", {"intermediate_size": 64}, "mlp.up_proj.weight] expected shape [64, 96] from config.json"),
        ("phi3", {"intermediate_size": 64}, "mlp.gate_up_proj.weight] expected shape [128, 128] from config"),
        (
            "opt",
            {"max_position_embeddings": 600},
            "embed_positions.weight] expected 602 rows from config.json",
        ),
        ("mpt", {"attn_config": 3}, "[config.json] expected fields as transformers writes them for mpt"),
        (
            "phi3",
            {"rope_scaling": None, "partial_rotary_factor": float("inf")},
            "expected fields as transformers",
        ),
        ("llama", {"pad_token_id": True}, "[tokenizer] expected a number as pad_token_id; got True"),
    ],
)
def test_config_of_another_model(
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model_type: str,
    changed: dict[str, Any],
    message: str,
) -> None:
    """Its numbers are in range but are not those of the weights, or are of another kind."""
    directory = tiny(model_type)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changed))
    assert message in refused(capsys, [str(directory), "--method", "none"], tmp_path / "out.gguf")


def test_bpe_without_merges(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny()
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = refused(capsys, [str(directory), "--method", "none"], tmp_path / "out.gguf")
    assert line.startswith("error: [tokenizer.json] expected a BPE with a merge or more")


def test_damaged_weights(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.gguf"
    weights = tiny() / "model.safetensors"
    whole = weights.read_bytes()
    arguments = [str(weights.parent), "--method", "none"]
    for damaged in (whole[: len(whole) // 2], b"\xff" * 8 + whole[8:], whole[:8] + b"[" + whole[9:]):
        weights.write_bytes(damaged)
        assert "[model.safetensors] expected a whole safetensors file; got" in refused(capsys, arguments, out)
    weights.write_bytes(whole[:-4] + np.float32(np.nan).tobytes())
    assert "expected finite weights; got 1 that are not" in refused(capsys, arguments, out)


def test_bad_calibration(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, text, out = tiny(), tmp_path / "text", tmp_path / "out.gguf"
    arguments = [str(directory), "--group", "1", "--calib", str(text)]
    assert "got No such file" in refused(capsys, arguments, out)
    text.write_text("")
    assert "at least 256 tokens; got an empty file" in refused(capsys, arguments, out)
    text.write_text("A short sentence.")
    assert "expected a text of at least 256 tokens; got" in refused(capsys, arguments, out)
    text.write_bytes(b"words \xff\xfe " * 100)
    assert "expected UTF-8 text; got byte 0xff at 6" in refused(capsys, arguments, out)


def test_output_that_cannot_be_written(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(tiny())
    assert "expected an existing directory" in refused(
        capsys, [directory, "--method", "none"], tmp_path / "no" / "x.gguf"
    )
    assert cli.main([directory, "--method", "none", "-o", str(tmp_path)]) == 2
    assert "got the directory" in capsys.readouterr().err


def test_output_that_is_read(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own name, through a link, under a side file's name, or under one that is read."""
    directory = tiny()
    inside = {path: path.read_bytes() for path in directory.iterdir()}
    text = tmp_path / "text.report.json"
    text.write_text(TEXT, encoding="utf-8")
    (tmp_path / "soft.gguf").symlink_to(directory / "config.json")
    (tmp_path / "hard.gguf").hardlink_to(directory / "model.safetensors")
    refused_names = [
        *(directory / name for name in ("model.safetensors", "config.json", "tokenizer_config.json")),
        directory / "pytorch_model.bin",
        *(tmp_path / name for name in ("soft.gguf", "hard.gguf", "text.gguf")),
    ]
    capsys.readouterr()
    for method in ("lorc", "none"):
        for out in refused_names:
            arguments = [str(directory), "--method", method, "--calib", str(text), "-o", str(out)]
            assert cli.main(arguments) == 2
            read = text if out.name == "text.gguf" else out
            line = f"error: [--output] expected a file that this conversion does not read; got {read}\n"
            assert capsys.readouterr().err == line
    assert {path: path.read_bytes() for path in directory.iterdir()} == inside
    assert text.read_text(encoding="utf-8") == TEXT


def test_output_that_is_no_regular_file(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(tiny())
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "side.report.json").mkdir()
    (tmp_path / "drawn.ranks.png").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    for name, got in {
        "pipe": f"the pipe {tmp_path}/pipe",
        "link": f"the pipe {tmp_path}/link",
        "side.gguf": f"the directory {tmp_path}/side.report.json",
        "drawn.gguf": f"the directory {tmp_path}/drawn.ranks.png",
    }.items():
        assert cli.main([directory, "--method", "lorc", "-o", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err == f"error: [--output] expected a file name; got {got}\n"
    assert sorted(tmp_path.iterdir()) == before
    arguments = [directory, "--method", "lorc", "--no-plot", "-o", str(tmp_path / "drawn.gguf")]
    assert cli.main(arguments) == 0


def test_output_through_a_link(tiny: Tiny, tmp_path: Path) -> None:
    """The link stays; what it leads to becomes the file."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.gguf").symlink_to(tmp_path / "elsewhere" / "real.gguf")
    assert cli.main([str(tiny()), "--method", "none", "-o", str(tmp_path / "out.gguf")]) == 0
    assert (tmp_path / "out.gguf").is_symlink()
    assert "blk.2.attn_k.weight" in tensors(tmp_path / "elsewhere" / "real.gguf")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("rank_map", "out.gguf and out.report.json are complete, out.ranks.png is not written"),
        ("Report", "out.gguf is complete, out.report.json and out.ranks.png are not written"),
    ],
)
def test_ctrl_c_names_what_is_complete(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: str,
    said: str,
) -> None:
    def stop(*arguments: object) -> None:
        raise stopped

    directory = tiny()
    out = tmp_path / "out.gguf"
    out.write_bytes(b"what was there before")
    monkeypatch.setattr(report, step, stop)
    arguments = [str(directory), "--method", "lorc", "-o", str(out)]
    capsys.readouterr()
    stopped: BaseException = KeyboardInterrupt()
    assert cli.main(arguments) == 130
    assert capsys.readouterr().err == f"error: [convert] interrupted; {said}\n"
    assert "blk.2.attn_k_a.weight" in tensors(out)
    stopped = OSError(28, "No space left on device")
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.endswith("No space left on device; " + said + "\n")
    assert len(list(tmp_path.glob("out*"))) == len(said.split(" complete")[0].split(" and "))


def limited(size: int) -> Callable[[], None]:
    """In the child: no file may grow past `size` bytes, as on a full disk."""

    def apply() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return apply


def test_full_disk_keeps_the_old_file(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"what was there before")
    command = [sys.executable, str(SCRIPT), str(tiny()), "-o", str(out), "--method", "none"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited(100_000), check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: [output] expected to write")
    assert len(done.stderr.splitlines()) == 1
    assert out.read_bytes() == b"what was there before"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == ["out.gguf"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert "blk.2.attn_k.weight" in tensors(out)


def test_ctrl_c_leaves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text(TEXT * 200, encoding="utf-8")
    out = tmp_path / "out.gguf"
    command = [
        sys.executable,
        str(SCRIPT),
        str(tiny(num_hidden_layers=24)),
        "-o",
        str(out),
        "--calib",
        str(text),
    ]
    cache = tmp_path / "ctrl-c"
    child = subprocess.Popen(
        [*command, "--group", "1", "--calib-tokens", "10000000"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"},
    )
    time.sleep(8)
    assert child.poll() is None  # still at work
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert errors.splitlines()[-1].startswith("error: [convert] interrupted; nothing written")
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("out*"))


def test_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> np.ndarray:
        raise KeyboardInterrupt

    tensor = gguf_write.OutTensor("a", (4, 32), "weight", interrupted)
    mix = Mix("f32", "llama", n_layer=1, n_group=1, tied=True, important=False)
    encoding = Encoding("f32", "f32", copies=False, mix=mix)
    with pytest.raises(KeyboardInterrupt):
        gguf_write.write(tmp_path / "out.gguf", "llama", {}, [tensor], encoding, lambda tensor: None)
    assert not list(tmp_path.iterdir())


def test_help_is_quick_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for option in (
        "--kv-budget",
        "--prefer",
        "--group",
        "--calib",
        "--outtype",
        "--no-rotate",
        "--seed",
        "none",
        "palu",
    ):
        assert option in text


def test_help_and_refusals_do_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from latentkv_convert import cli\n"
        "assert cli.main(['nowhere', '-o', 'x.gguf', '--calib', 'none']) == 2\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_missing_extra_names_the_install_command() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from latentkv_convert.errors import ConvertError, need\n"
        "try:\n    need('torch')\n"
        "except ConvertError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True, check=False
    )
    assert "run pip install 'latentkv[convert]'" in done.stdout
