"""Options of sessions and samplers stand once in C++ and once in Python, by the same names and defaults."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from runtime import model

from latentkv import Llama, _core
from latentkv.plan.options import SessionOptions
from latentkv.sampling.options import NAMES, RANDOM_SEED, SERVER_NAMES, SERVER_OPTIONS, SamplingOptions
from latentkv.server.schemas import Sampling

NATIVE = Path(__file__).resolve().parents[2] / "native" / "src"
OWN = {"kv_budget", "grammar"}  # Python's alone: it makes a plan of the one and a matcher of the other


def struct(header: str, name: str) -> dict[str, str]:
    """Fields of a C++ struct, and their defaults as they are written."""
    text = (NATIVE / header).read_text(encoding="utf-8")
    body = re.search(rf"^struct {name} {{\n(.*?)^}};", text, re.DOTALL | re.MULTILINE)
    assert body is not None
    lines = re.findall(r"^    (?!static)[\w:<>, ]+ (\w+)(?: = ([^;]+))?;", body[1], re.MULTILINE)
    return dict(lines)


def defaults(kind: Any) -> dict[str, Any]:
    return {
        each.name: each.default if each.default is not MISSING else each.default_factory()
        for each in fields(kind)
        if each.name not in OWN
    }


def written(value: Any) -> set[str]:
    """How C++ may say it."""
    if value in ("", (), {}):
        return {""}
    if isinstance(value, bool):
        return {str(value).lower()}
    if isinstance(value, str):
        return {f'"{value}"'}
    if isinstance(value, tuple):
        return {
            "{" + ", ".join('"' + each.replace("\n", r"\n").replace('"', r"\"") + '"' for each in value) + "}"
        }
    return {f"{value:g}", str(value), f"{value}f"}


@pytest.mark.parametrize(
    ("header", "name", "kind"),
    [
        ("runtime/plan/session_options.h", "SessionOptions", SessionOptions),
        ("tokens/sampler.h", "SamplerOptions", SamplingOptions),
    ],
)
def test_both_languages_have_the_same_options(header: str, name: str, kind: Any) -> None:
    native, ours = struct(header, name), defaults(kind)
    assert len(native) > 20
    assert set(native) == set(ours)
    differing = {"seed": "random_seed", "dry_penalty_last_n": "0"}
    for option, default in ours.items():
        assert native[option] in written(default) | {differing.get(option, "")}, option


def test_every_option_reaches_native_code(converted: Any) -> None:
    plain = model(converted("--method", "none", "--outtype", "f32"))
    session = {name: value for name, value in defaults(SessionOptions).items() if name != "n_ctx"}
    assert plain.forecast(64, **session) == plain.forecast(64)
    assert _core.Session(plain, **session | {"n_ctx": 64, "n_threads": 1}).n_ctx == 64
    sampler = defaults(SamplingOptions) | {"seed": 7}
    assert sampler.keys() == defaults(SamplingOptions).keys()
    assert _core.Sampler(plain, **sampler).seed == 7
    for call in (
        lambda: plain.forecast(64, kv_budget="14%"),
        lambda: _core.Session(plain, n_ctxt=64),
        lambda: _core.Sampler(plain, grammar="root ::= x"),
    ):
        with pytest.raises(TypeError, match="got an unexpected keyword argument"):
            call()
    for call in (
        lambda: _core.Session(plain, n_ctx="64"),
        lambda: plain.forecast(64, k_plan="q4"),
        lambda: _core.Sampler(plain, top_k=1.5),
    ):
        with pytest.raises(TypeError, match=r"got a <class '(str|float)'> for (n_ctx|k_plan|top_k)$"):
            call()


def test_options_are_keywords_where_they_differ_from_their_defaults() -> None:
    options = SessionOptions.of({"kv": "q4", "sink": 0, "kv_budget": "14%", "recent": -1})
    assert dict(options) == {"kv": "q4", "sink": 0, "kv_budget": options.kv_budget}
    assert str(options.kv_budget) == "14%"
    assert dict(SessionOptions()) == {}
    with pytest.raises(TypeError, match="n_ctxt"):
        SessionOptions.of({"n_ctxt": 3})
    assert SamplingOptions().seed == RANDOM_SEED


def test_public_signatures_name_every_option() -> None:
    # what a budget becomes, and a draft model
    session = set(defaults(SessionOptions)) - {"k_plan", "v_plan", "n_guesses"}
    assert session <= set(inspect.signature(Llama).parameters)
    server = {SERVER_NAMES.get(name, name) for name in NAMES} - {"infill"}  # named among `samplers`
    assert server <= set(Sampling.model_fields)
    named = set(NAMES) - set(SERVER_OPTIONS) - {"penalty_last_n", "infill"}
    for call in (Llama.create_completion, Llama.create_chat_completion):
        assert named <= set(inspect.signature(call).parameters)
