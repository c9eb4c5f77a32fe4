"""The command as a shell sees it: listing, statuses, errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from latentkv.cli import commands
from latentkv.cli._errors import one_line
from latentkv.cli._table import markdown
from latentkv.quantities import bytes_text, count_text, digits


def test_help_lists_every_command(run: Any) -> None:
    done = run("--help")
    assert done.returncode == 0
    assert set(commands()) >= {"bench", "chat", "convert", "info", "perplexity"}
    for name in commands():
        line = next(line for line in done.stdout.splitlines() if line.split()[:1] == [name])
        assert len(line.split()) > 4
        assert len(line) <= 110
    assert run().stdout == done.stdout


def test_version(run: Any) -> None:
    assert run("--version").stdout.split()[0] == "latentkv"


@pytest.mark.parametrize("command", [name for name in commands() if name != "convert"])
def test_command_help(run: Any, command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: latentkv {command}")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["frobnicate"], "error: [latentkv] expected a command (bench, chat, "),
        (
            ["info"],
            "error: [latentkv info] expected one of FILE, -m FILE and -hf USER/REPO; got none; see "
            "latentkv info --help",
        ),
        (
            ["info", "a.gguf", "--bogus"],
            "error: [latentkv info] expected options as in latentkv info --help; got --bogus",
        ),
        (
            ["info", "a.gguf", "--ctx", "512"],
            "error: [latentkv info] expected options as in latentkv info --help; got --ctx 512; "
            "perhaps --ctx-size",
        ),
        (
            ["pull", "llama3"],
            f"error: [latentkv] expected a command ({', '.join(commands())}); "
            "got 'pull'; write latentkv chat -hf USER/REPO",
        ),
        (
            ["perplexity", "a.gguf"],
            "error: [latentkv perplexity] expected -f/--file; got none; see latentkv perplexity --help",
        ),
        (["info", "a.gguf", "-c"], "error: [-c] expected one argument; got none"),
        (
            ["info", "a.gguf", "-c", "x"],
            "error: [-c] expected 1 … 268435456, or 0 (as trained), or auto; got x",
        ),
        (["info", "a.gguf", "--json=1"], "error: [--json] expected no value; got '1'"),
        (["chat", "a.gguf", "--top-p", "x"], "error: [--top-p] expected a number from 0 to 1; got x"),
        (["chat", "a.gguf", "--mirostat", "x"], "error: [--mirostat] expected an integer; got 'x'"),
        (["chat", "a.gguf", "--mirostat", "3"], "error: [--mirostat] expected one of 0, 1, 2; got 3"),
        (["convert", "a.gguf"], "error: [latentkv convert] expected -o/--output; got none; see"),
        (["bench", "a.gguf", "-d", "x"], "error: [-d] expected numbers separated by commas; got 'x'"),
        (
            ["bench", "a.gguf", "-p", "0", "-n", "0"],
            "error: [-p, -n] expected a test with tokens; got -p 0 -n 0",
        ),
        (["chat", "a.gguf", "-p", "x", "-f", "y"], "error: [-p, -f] expected one of them; got both"),
        (["chat", "a.gguf", "-p", ""], "error: [prompt] expected some text"),
        (["chat", "a.gguf"], "error: [prompt] expected some text from -p, -f or the pipe; got nothing"),
        (["chat", "a.gguf", "-f", "none.txt"], "error: [file] expected to open none.txt; got no such file"),
        (["chat", "a.gguf", "-f", "/"], "error: [file] expected to open /; got is a directory"),
        (["chat", "a.gguf", "-p", "x", "-sys", "a", "-sysf", "b"], "error: [-sys, -sysf] expected one of"),
        (["chat", "a.gguf", "-p", "x", "--raw", "-sys", "a"], "error: [--raw] expected no -sys beside it"),
        (
            ["chat", "a.gguf", "-p", "x", "--raw", "--chat-template-kwargs", '{"a": 1}'],
            "error: [--raw] expected no --chat-template-kwargs beside it",
        ),
        (["chat", "a.gguf", "-p", "x", "-j", "{"], "error: [json_schema] expected a schema as JSON; got '{'"),
        (["chat", "a.gguf", "-p", "x", "--grammar-file", "none"], "error: [file] expected to open none; got"),
        (["chat", "a.gguf", "--presence-penalty", "inf"], "error: [--presence-penalty] expected a finite"),
    ],
)
def test_bad_arguments(run: Any, args: list[str], message: str) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["-m", "a.gguf"], "got '-m'; write latentkv chat -m …, or serve in place of chat"),
        (["a.gguf"], "got 'a.gguf'; write latentkv chat a.gguf …, or serve in place of chat"),
        (["llama-server"], "got 'llama-server'; write latentkv serve"),
        (["llama-perplexity"], "got 'llama-perplexity'; write latentkv perplexity"),
        (["convrt"], "got 'convrt'; write latentkv convert"),
        (["frobnicate"], "got 'frobnicate'"),
    ],
)
def test_a_command_that_was_meant_is_named(run: Any, args: list[str], hint: str) -> None:
    assert run(*args).stderr.rstrip().endswith(hint)


@pytest.mark.parametrize("command", ["info", "bench", "chat"])
def test_missing_and_broken_files(run: Any, plain_gguf: Path, tmp_path: Path, command: str) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + plain_gguf.read_bytes()[4:5000])
    for path in (tmp_path / "none.gguf", broken, tmp_path):
        done = run(command, path, *(["-p", "x"] if command == "chat" else []))
        assert done.returncode == 2, (path, done)
        assert done.stderr.startswith("error: [")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["chat", "convert"])
def test_every_command_says_its_version(run: Any, command: str) -> None:
    assert run(command, "--version").stdout == run("--version").stdout


def test_info(run: Any, latent_gguf: Path, plain_gguf: Path) -> None:
    done = run("info", latent_gguf, "-c", 65536)
    assert done.returncode == 0, done.stderr
    assert all(
        len(line) <= 100 for line in done.stdout.splitlines() if not line.startswith(("file", "recipe"))
    )
    for word in ("rebuild", "latent", "bytes/token", "q4", "65536 is beyond"):
        assert word in done.stdout
    report = json.loads(run("info", latent_gguf, "--json").stdout)
    assert len(report["layers"]) == report["file"]["n_layer"] == 8
    by_format = {row["kv"]: row for row in report["forecast"]}
    assert by_format["q2"]["total"] < by_format["q4"]["total"] < by_format["f16"]["total"]
    assert "full" in run("info", plain_gguf, "--kv", "q8_0").stdout


def test_forecast_is_what_a_session_allocates(run: Any, latent_gguf: Path) -> None:
    from latentkv import Llama

    report = json.loads(run("info", latent_gguf, "--kv", "q3", "-c", 512, "--json").stdout)
    row = next(row for row in report["forecast"] if row["n_ctx"] == 512)
    with Llama(str(latent_gguf), n_ctx=512, kv="q3") as llama:
        assert llama.kv_bytes()["total"] == row["total"]


def test_info_forecasts_a_gpu_that_is_not_there(run: Any, latent_gguf: Path) -> None:
    forecast = {}
    for layers in (0, 99):
        done = run("info", latent_gguf, "--kv", "q3", "-c", 512, "-ngl", layers, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        forecast[layers] = json.loads(done.stdout)["forecast"][-1]
    assert forecast[99]["total"] == forecast[0]["total"]
    assert 0 < forecast[99]["weights"] <= forecast[0]["weights"]
    assert forecast[99]["compute"] != forecast[0]["compute"]
    assert "of q4 on the GPU weights" in run("info", latent_gguf, "-ngl", 99, "--kv", "q4").stdout
    shared = run("info", latent_gguf, "--kv", "q3", "-c", 512, "-ngl", 99, "-ts", "1,1", "--json")
    runs = json.loads(shared.stdout)["forecast"][-1]["runs"]
    assert [device["gpu"] for device in runs] == [0, 1]
    assert sum(device["weights"] for device in runs) == forecast[99]["weights"]
    told = run("info", latent_gguf, "-ngl", 3, "-ts", "2,1", "--kv", "q4").stdout
    assert "of q4 on GPU 0 weights" in told
    assert "and on GPU 1 weights" in told
    told = run("info", latent_gguf, "-ngl", 3, "--kv", "q4").stdout
    assert "of q4 on the GPU weights" in told
    assert "and on the host weights" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--no-kv-rotate"],
            "[latentkv info] expected options as in latentkv info --help; got --no-kv-rotate",
        ),
        (["--kv-sink", "q4"], "[--kv-sink] expected sink tokens, whose format it is; got none"),
        (["--kv-recent", "q4"], "[--kv-recent] expected recent tokens, whose format it is; got none"),
        (["-ngl", "most"], "[-ngl] expected 0 … 2147483647, or -1 (all), or auto; got most"),
        (["-ts", "3,many"], "[-ts] expected shares of 0 or more, as in 3,1; got 3,many"),
        (["-ts", "1,-1"], "[-ts] expected shares of 0 or more, as in 3,1; got 1,-1"),
        (["-sm", "row"], "[-sm] expected none or layer, as a layer has one device; got row"),
        (["-mg", "first"], "[-mg] expected 0 … 2147483647; got first"),
    ],
)
def test_info_refuses_what_changes_nothing(
    run: Any, latent_gguf: Path, arguments: list[Any], message: str
) -> None:
    done = run("info", latent_gguf, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["chat", "-p", "x", "-n", 1], ["serve", "--port", 1]], ids=str)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-sink", "q4"], "[--kv-sink] expected sink tokens, whose format it is; got none"),
        (["--kv-recent", "q4"], "[--kv-recent] expected recent tokens, whose format it is; got none"),
        (["--no-kv-rotate"], "[--no-kv-rotate] expected full K or V in formats as q8_0; got none"),
    ],
)
def test_commands_refuse_what_changes_nothing(
    run: Any, latent_gguf: Path, command: list[Any], arguments: list[str], message: str
) -> None:
    done = run(command[0], latent_gguf, *command[1:], "-c", 64, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


def test_what_changes_something_is_taken(run: Any, plain_gguf: Path) -> None:
    rows = ["--kv", "q4_0", "--sink", 4, "--kv-sink", "q8_0", "--no-kv-rotate"]
    done = run("chat", plain_gguf, "-p", "x", "-n", 1, "-c", 64, *rows)
    assert (done.returncode, done.stderr.count("error")) == (0, 0)


def test_require_fused_is_kept(run: Any, latent_gguf: Path) -> None:
    from latentkv import _core

    if _core.build_info()["cuda"]:
        pytest.skip("a build with CUDA: the GPU that is asked for may be there")
    for command in (["chat", "-p", "x", "-n", 1], ["bench", "-p", 4, "-n", 1, "-r", 1]):
        done = run(command[0], latent_gguf, *command[1:], "-ngl", 99, "--require-fused")
        assert done.returncode == 2
        assert done.stderr.startswith("error: [require_fused] expected fused attention on the GPU")
        assert done.stderr.count("\n") == 1


def test_bench_of_several_lengths(run: Any, plain_gguf: Path) -> None:
    words = ("bench", plain_gguf, "-p", "8,16,0", "-n", "2,3", "-d", "0,32", "-r", 1, "-t", 1, "--json")
    rows = json.loads(run(*words).stdout)["results"]
    names = [row["name"] for row in rows]
    assert names == ["pp8", "tg2", "pp16", "tg3", "pp8 @ d32", "tg2 @ d32", "pp16 @ d32", "tg3 @ d32"]
    assert run("bench", plain_gguf, "-p", "8,x").stderr.startswith("error: [-p] expected numbers separated")


def test_bench(run: Any, latent_gguf: Path) -> None:
    args = ["bench", latent_gguf, "-p", 16, "-n", 4, "-d", "0,256", "--kv", "f16,q8/q4", "-r", 2, "-t", 1]
    done = run(*args, "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    names = [row["name"] for row in results]
    assert names == ["pp16", "tg4", "pp16 @ d256", "tg4 @ d256"] * 2
    assert all(len(row["samples"]) == 2 and row["mean"] > 0 for row in results)
    assert results[2]["kv_bytes"] > results[0]["kv_bytes"]
    assert results[6]["kv_bytes"] < results[2]["kv_bytes"]
    shown = run(*args, "-o", "md").stdout
    assert shown.startswith("| model")
    assert len(shown.splitlines()) == 2 + len(results)


def test_bench_of_several_thread_counts(run: Any, plain_gguf: Path) -> None:
    args = ("bench", plain_gguf, "-p", 8, "-n", 2, "-r", 1, "-t", "1,2")
    rows = json.loads(run(*args, "--json").stdout)["results"]
    assert [(row["threads"], row["name"]) for row in rows] == [(1, "pp8"), (1, "tg2"), (2, "pp8"), (2, "tg2")]
    assert [line.split("|")[6].strip() for line in run(*args, "-o", "md").stdout.splitlines()[2:]] == list(
        "1122"
    )
    assert run("bench", plain_gguf, "-t", "1,x").stderr.startswith("error: [-t] expected 1 … 512, or 0 (")


def test_bench_shows_what_it_measured_before_a_test_that_fails(run: Any, plain_gguf: Path) -> None:
    done = run("bench", plain_gguf, "-p", 8, "-n", 2, "-r", 1, "-t", 1, "--kv", "f16,q9", "--json")
    assert done.returncode == 2
    assert done.stderr.startswith("error: [kv] expected ")
    assert [row["name"] for row in json.loads(done.stdout)["results"]] == ["pp8", "tg2"]


def test_bench_goes_back_to_a_depth_within_a_block(run: Any, plain_gguf: Path) -> None:
    done = run(
        "bench", plain_gguf, "-p", 400, "-n", 0, "-d", 100, "-r", 1, "-t", 1, "--kv", "small", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in json.loads(done.stdout)["results"]] == ["pp400 @ d100"]


def test_closed_pipe_is_quiet(latent_gguf: Path) -> None:
    command = f"{sys.executable} -m latentkv info {latent_gguf} --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_numbers_for_people() -> None:
    assert [digits(n, 2) for n in (0, 1.2e-5, 0.0038, 0.25, 1.5, 120)] == [
        *("0", "0.000012", "0.0038", "0.25", "1.5", "120")
    ]
    assert [bytes_text(n) for n in (0, 1023, 8192, 17_000_000, 5 << 30)] == [
        "0 B", "1023 B", "8.00 KiB", "16.2 MiB", "5.00 GiB",
    ]  # fmt: skip
    assert [count_text(n) for n in (12, 8_524_032, 8_030_261_248)] == ["12", "8.52 M", "8.03 B"]
    assert markdown(["a", "n"], [["x", "1"]]).splitlines()[1] == "|-----|----:|"


def test_convert_without_its_dependencies(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from latentkv.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    root = Path(__file__).resolve().parents[3]
    args = [
        "convert",
        root / "models/demo",
        "-o",
        str(tmp_path / "x.gguf"),
        "--calib",
        root / "models/demo/sample-val.txt",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "torch" in done.stderr.splitlines()[-1]
    assert "pip install 'latentkv[convert]'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("library", "line"),
    [
        (
            "libcuda.so.1",
            "[install] expected libcuda.so.1 of NVIDIA's driver, which a CUDA build needs; got none; ",
        ),
        (
            "libcublas.so.13",
            "[install] expected libcublas.so.13 of the CUDA toolkit, which a CUDA build needs; ",
        ),
        ("libgomp.so.1", "[install] expected the shared library libgomp.so.1; got none; install it"),
    ],
)
def test_a_library_that_the_machine_lacks(library: str, line: str) -> None:
    said = f"{library}: cannot open shared object file: No such file or directory"
    assert str(one_line(ImportError(said, name="_core"))).startswith(line)
    assert one_line(ImportError("undefined symbol: x", name="_core")) is None
