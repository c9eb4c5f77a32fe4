"""What a file recommends (general.sampling.*) is drawn where neither a call nor a flag says otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latentkv.cli._sampling import add_sampling, sampling_options
from latentkv.console.arguments import Parser
from latentkv.sampling.options import SamplingOptions
from latentkv.sampling.recommended import recommended

MAKERS = {
    "temperature": 0.25,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.125,
    "repetition_penalty": 1.25,
    "xtc_probability": 0.5,
    "do_sample": True,
}
OPTIONS = {
    "temperature": 0.25,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.125,
    "xtc_probability": 0.5,
    "penalty_last_n": -1,
    "repeat_penalty": 1.25,
}


def keys(**values: Any) -> dict[str, Any]:
    return {f"general.sampling.{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("metadata", "options"),
    [
        ({"general.name": "a"}, {}),
        (keys(temp=0.949999988079071, top_k=40.0), {"temperature": 0.95, "top_k": 40}),
        (keys(temp=0, min_p=0.0, penalty_last_n=-1), {"temperature": 0, "min_p": 0, "penalty_last_n": -1}),
        (keys(mirostat=2, mirostat_tau=3.0), {"mirostat_mode": 2, "mirostat_tau": 3.0}),
        (keys(top_k=0, xtc_threshold=0.2), {"top_k": 0, "xtc_threshold": 0.2}),
    ],
    ids=str,
)
def test_keys_of_a_file(metadata: dict[str, Any], options: dict[str, Any], capsys: Any) -> None:
    assert recommended(metadata) == options
    assert not capsys.readouterr().err


def test_samplers_that_a_file_does_not_list(capsys: Any) -> None:
    found = recommended(keys(temp=0.5, top_p=0.9, top_k=5, sequence="top_k;temperature"))
    assert (found["temperature"], found["top_k"], found["top_p"], found["min_p"]) == (0.5, 5, 1.0, 0.0)
    assert recommended(keys(temp=0.5, sequence="temperature;top_k")) == {"temperature": 0.5}
    assert "warning: [general.sampling.sequence] expected each once, in the order" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [("temp", -1.0), ("temp", "warm"), ("top_p", 1.5), ("top_k", [1]), ("top_k", 1.5), ("min_p", True)],
)
@pytest.mark.parametrize("beside", [{}, {"mirostat": 1}])
def test_values_that_no_option_takes(
    name: str, value: Any, beside: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    found = recommended(keys(**{name: value}, **beside))
    assert found == ({"mirostat_mode": 1} if beside else {})
    said = capsys.readouterr().err
    assert said.startswith(f"warning: [general.sampling.{name}] expected ")
    assert said.endswith("; left out\n")
    assert said.count("\n") == 1


class Opened:
    last_n_tokens_size = 64
    seed = 1

    def __init__(self, **found: Any) -> None:
        self.recommended = found

    def n_ctx(self) -> int:
        return 512

    def __getattr__(self, name: str) -> Any:
        """The calls, whose signatures have defaults."""
        from latentkv import Llama

        return getattr(Llama, name)


@pytest.mark.parametrize("call", ["create_completion", "create_chat_completion", "generate", "sample"])
def test_a_call_before_the_file_before_the_default(call: str) -> None:
    name = "temperature" if call.startswith("create") else "temp"
    plain: dict[str, Any] = {
        "tfs_z": 1.0,
        "seed": None,
        "server": {},
        name: None,
        "top_k": None,
        "min_p": 0.3,
    }
    usual = SamplingOptions.of_call(call, plain, Opened())
    assert usual.temperature == (0.2 if "chat" in call else 0.8)
    assert (usual.top_k, usual.min_p) == (40, 0.3)
    file = Opened(temperature=0.5, top_k=3, min_p=0.1, xtc_probability=0.4)
    drawn = SamplingOptions.of_call(call, plain, file)
    assert (drawn.temperature, drawn.top_k, drawn.min_p, drawn.xtc_probability) == (0.5, 3, 0.3, 0.4)
    asked = plain | {name: 0.0, "top_k": 40, "server": {"xtc_probability": 0.0}}
    drawn = SamplingOptions.of_call(call, asked, file)
    assert (drawn.temperature, drawn.top_k, drawn.xtc_probability) == (0.0, 40, 0.0)


def test_flags_that_are_not_given_say_nothing() -> None:
    parser = Parser("test")
    add_sampling(parser)
    given = sampling_options(parser.parse_args(["--temp", "0", "--top-k", "0"]))
    assert (given.pop("temperature"), given.pop("top_k")) == (0, 0)
    assert not set(given) & set(OPTIONS)


@pytest.fixture(scope="module")
def file(converted: Callable[..., Path], demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("makers") / "demo"
    shutil.copytree(demo, folder)
    (folder / "generation_config.json").write_text(json.dumps(MAKERS))
    return converted("--method", "none", source=folder)


def test_from_a_checkpoint_to_a_call(file: Path) -> None:
    from latentkv import Llama

    with Llama(str(file), n_ctx=128) as llm:
        assert llm.recommended == OPTIONS
        assert llm.last_n_tokens_size == -1
        open_ = llm("The clerk", max_tokens=12, seed=5)["choices"][0]["text"]
        names = {name: value for name, value in OPTIONS.items() if name != "penalty_last_n"}
        said = llm("The clerk", max_tokens=12, seed=5, repeat_last_n=-1, **names)["choices"][0]["text"]
        assert open_ == said
    with Llama(str(file), n_ctx=128, last_n_tokens_size=0) as llm:
        assert llm.last_n_tokens_size == 0


def test_info_says_it(file: Path, plain_gguf: Path, run: Any) -> None:
    shown = run("info", str(file)).stdout
    assert "sampling temperature 0.25, top_k 7, top_p 0.5, min_p 0.125, xtc_probability 0.5" in shown
    assert "unless a flag or a request says otherwise" in shown
    assert json.loads(run("info", str(file), "--json").stdout)["file"]["sampling"] == OPTIONS
    assert "\nsampling" not in run("info", str(plain_gguf)).stdout
