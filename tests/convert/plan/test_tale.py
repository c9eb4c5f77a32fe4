"""TALE: V truncated in old tokens, regions with their own bits, against transformers and against torch."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from both import distance, load, logits, run, token_ids
from test_matrix import MODELS, planned

from conftest import TEXT, Tiny, keys
from latentkv.errors import LatentKVError
from latentkv_convert.cli import parse
from latentkv_convert.errors import ConvertError
from latentkv_convert.ir import FULL
from latentkv_convert.pipeline import convert
from latentkv_convert.plan import methods
from latentkv_convert.source import archs
from latentkv_convert.source.checkpoint import Checkpoint
from latentkv_convert.source.checkpoint_source import CheckpointSource

core = pytest.importorskip("latentkv._core", reason="needs the native module (pip install .)")

N = 120
F32 = {"kv": "f32", "kv_sink": "f32", "kv_recent": "f32"}
HYBRIDS = ("qwen3.5", "qwen3.5-moe", "qwen3-next")  # whose prompts are never lazy
REGIONS = ("llama", "llama-head-80", "qwen3", "phi3")  # eager attention is a function there


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and statistics, made once."""
    directory = tmp_path_factory.mktemp("tale")
    (directory / "calib.txt").write_text(TEXT, encoding="utf-8")
    return directory


@pytest.fixture(autouse=True)
def shared_cache(own_cache: None, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(room / "cache"))


@pytest.fixture
def checkpoint(room: Path, random_checkpoint: Tiny) -> Any:
    def make(name: str) -> Path:
        model_type, config = MODELS[name]
        if not (room / name).is_dir():
            random_checkpoint(room / name, model_type, **config)
        return room / name

    return make


def arguments(room: Path, keep: float, *more: str) -> list[str]:
    text = ["--calib", str(room / "calib.txt"), "--calib-window", "128", "--calib-tokens", "1024"]
    return ["--method", "tale", "--keep", str(keep), *text, *more]


def vars_of(method: str, directory: Path) -> Any:
    """A method's options at their defaults."""
    return parse([str(directory), "-o", str(directory / "unused.gguf"), "--method", method], "test").options


def session(model: Any, **options: Any) -> Any:
    return core.Session(model, **({"n_ctx": 256, "n_threads": 1} | options))


def one_by_one(live: Any, ids: list[int]) -> np.ndarray:
    """[n, n_vocab]; with lazy prefill the first token is a prompt, which sees itself exactly."""
    return np.concatenate([live.decode([token]) for token in ids])


def whole_columns(n: int, sink: int, ratio: float, prompt: int = 0, batch: int = 32) -> np.ndarray:
    """[n_query, n_token]: whether a query finds every column of a token's V, tokens coming one by one, or
    behind a prompt that was prefilled lazily.

    A token leaves the recent window, with all that are older, once a whole batch is ready to leave. Ratio 0
    is no recent region.
    """
    if ratio == 0:
        whole = np.tile(np.arange(n) < sink, (n, 1))
        whole[:prompt] = True
        return whole
    seen = np.zeros((n, n), dtype=bool)
    seen[:prompt] = True
    first_recent = sink if prompt == 0 else prompt - math.ceil(ratio * (prompt - sink) - 1e-4)
    for query in range(prompt, n):
        seen[query, :sink] = True
        seen[query, first_recent : query + 1] = True
        window = math.ceil(ratio * max(0, query + 1 - sink) - 1e-4)
        if query + 1 - first_recent >= window + batch:
            first_recent = query + 1 - window
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_everything_kept_is_the_original(name: str, checkpoint: Any, room: Path, tmp_path: Path) -> None:
    directory, ids = checkpoint(name), token_ids(N)
    model = run(directory, tmp_path / "whole.gguf", *arguments(room, 1.0, "--kv-middle", "f16"))
    attending = [model.layers[index] for index in CheckpointSource(directory).spec.attention_layers]
    assert {layer["k"]["path"] for layer in attending} == {"full"}
    assert {layer["v"]["path"] for layer in attending} == {"latent"}
    exact = logits(load(directory), ids)
    for prefill in ("eager",) if name in HYBRIDS else ("eager", "lazy"):
        assert distance(session(model, **F32, prefill=prefill).decode(ids, output="all"), exact) < 5e-5
    assert distance(one_by_one(session(model, kv_recent="f16"), ids), exact) < 1e-3
    # whole latents say what full rows say
    flat = one_by_one(session(model, kv="f32", sink=0, recent=0), ids)
    assert distance(one_by_one(session(model, **F32), ids), flat) < 5e-5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("group", ["1", "all"])
def test_the_middle_keeps_a_prefix(
    name: str, group: str, checkpoint: Any, room: Path, tmp_path: Path
) -> None:
    """Without sink and recent tokens V is truncated for every query, as in a model with those weights; the
    rotation stays inside the kept columns."""
    directory, ids = checkpoint(name), token_ids(N)
    options = arguments(room, 0.75, "--group", group)
    cut = run(directory, tmp_path / "cut.gguf", *options)
    original = load(directory)
    exact = logits(original, ids)
    with reference.compressed(original, *planned(directory, options)) as truncated:
        expected = logits(truncated, ids)
    assert distance(expected, exact) > 0.02
    got = session(cut, **F32, sink=0, recent=0, prefill="eager").decode(ids, output="all")
    assert distance(got, expected) < 5e-5


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize(("sink", "ratio"), [(4, 0.1), (0, 0.3), (8, 0.0)])
def test_every_query_finds_the_columns_of_its_regions(
    name: str, sink: int, ratio: float, checkpoint: Any, room: Path, tmp_path: Path
) -> None:
    directory, ids = checkpoint(name), token_ids(N)
    options = arguments(room, 0.75, "--sink", str(sink), "--recent-ratio", str(ratio))
    cut = run(directory, tmp_path / "cut.gguf", *options)
    original = load(directory)
    with reference.regional(original, *planned(directory, options), whole_columns(N, sink, ratio)) as model:
        expected = logits(model, ids)
    got = one_by_one(session(cut, **F32, prefill="eager"), ids)
    assert distance(got, expected) < 5e-5
    with reference.regional(original, *planned(directory, options), whole_columns(N, 3, 0.5)) as model:
        assert distance(got, logits(model, ids)) > 1e-3  # other regions show


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize(("sink", "ratio"), [(4, 0.1), (0, 0.0)])
def test_a_lazy_prompt_is_exact_and_compressed_behind_it(
    name: str, sink: int, ratio: float, checkpoint: Any, room: Path, tmp_path: Path
) -> None:
    """Logits of the prompt are the uncompressed model's; those that follow see its rows truncated, computed
    from exact hidden states."""
    directory, ids, prompt = checkpoint(name), token_ids(N), 80
    options = arguments(room, 0.75, "--sink", str(sink), "--recent-ratio", str(ratio))
    cut = run(directory, tmp_path / "cut.gguf", *options)
    assert cut.regions["prefill"] == "lazy"
    original = load(directory)
    exact = logits(original, ids)
    whole = whole_columns(N, sink, ratio, prompt)
    with reference.regional(original, *planned(directory, options), whole) as model:
        expected = logits(model, ids)
    assert distance(expected[prompt:], exact[prompt:]) > 0.02
    for more in ({}, {"n_ubatch": 27}, {"implementation": "reference"}):
        live = session(cut, **F32, **more)
        start = live.decode(ids[:prompt], output="all")
        assert distance(start, exact[:prompt]) < 5e-5
        rest = one_by_one(live, ids[prompt:])
        assert distance(np.concatenate([start, rest]), expected) < 5e-5


def test_one_layer_prefilled_lazily_holds_what_came_token_by_token(
    random_checkpoint: Tiny, room: Path, tmp_path: Path
) -> None:
    """Rows of the first layer do not depend on attention, so both ways must fill one cache alike."""
    directory = random_checkpoint(tmp_path / "one", "llama", num_hidden_layers=1)
    model = run(directory, tmp_path / "one.gguf", *arguments(room, 0.75))
    ids = token_ids(N)
    for kv, bound in (("f32", 1e-5), ("q8", 1e-3), ("q2", 0.05)):
        lazy = session(model, kv=kv, kv_sink="f32", recent=0)
        eager = session(model, kv=kv, kv_sink="f32", recent=0, prefill="eager")
        lazy.decode(ids[:80], output="none")
        one_by_one(eager, ids[:80])
        held = [[region["used"] for region in s.kv_bytes()["regions"]] for s in (lazy, eager)]
        assert held[0] == held[1] == [4, 76]
        assert distance(one_by_one(lazy, ids[80:]), one_by_one(eager, ids[80:])) < bound


def test_recurrent_layers_have_no_lazy_prompts(checkpoint: Any) -> None:
    spec = CheckpointSource(checkpoint("qwen3.5")).spec
    options = vars_of("tale", checkpoint("qwen3.5"))
    assert methods.module("tale").create(options, spec).prefill == "eager"
    expected = r"\[--prefill\] expected eager, as some layers are recurrent; got lazy"
    with pytest.raises(ConvertError, match=expected):
        methods.module("tale").create(options | {"prefill": "lazy"}, spec)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in HYBRIDS])
def test_every_architecture_prefills_lazily(name: str, checkpoint: Any, room: Path, tmp_path: Path) -> None:
    directory, ids = checkpoint(name), token_ids(N)
    model = run(directory, tmp_path / "cut.gguf", *arguments(room, 0.75))
    exact = logits(load(directory), ids)
    got = session(model, n_ubatch=50).decode(ids, output="all")  # the plan: q2 behind the prompt
    assert distance(got, exact) < 5e-5
    assert distance(session(model, prefill="eager").decode(ids, output="all"), exact) > 0.02


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("method", ["palu", "zack"])
def test_lazy_prefill_on_every_k_path(
    name: str, method: str, checkpoint: Any, room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At full rank, whatever the bits; `rotated` keys may be cut, as whole ones are at hand."""
    directory, ids = checkpoint(name), token_ids(N)
    exact = logits(load(directory), ids)
    text = arguments(room, 1.0)[4:]
    model = run(directory, tmp_path / "whole.gguf", "--method", method, "--keep", "1", *text)
    live = session(model, kv="q2", prefill="lazy", n_ubatch=50)
    assert distance(live.decode(ids, output="all"), exact) < 5e-5
    assert distance(session(model, kv="q2").decode(ids, output="all"), exact) > 0.05

    module = methods.module(method)
    kind = type(module.create(vars_of(method, directory), archs.model_spec(Checkpoint(directory).config)))
    planned_whole = kind.plan

    def v_whole(self: Any, work: Any) -> Any:
        plan = planned_whole(self, work)
        return replace(plan, layers=tuple(replace(layer, v=FULL) for layer in plan.layers))

    monkeypatch.setattr(kind, "plan", v_whole)
    cut = run(directory, tmp_path / "cut.gguf", "--method", method, "--keep", "0.6", *text)
    if cut.layers[0]["k"]["path"] != "rotated":
        with pytest.raises(
            ValueError,
            match=r"^\[prefill\] expected eager, as layer \d+ has \d+ of \d+ dimensions of K and its exact "
            r"values are not in the file; got lazy$",
        ):
            session(cut, prefill="lazy")
        return
    live = session(cut, kv="f32", prefill="lazy", n_ubatch=50)
    assert distance(live.decode(ids, output="all"), exact) < 5e-5
    reference_way = session(cut, kv="f32", prefill="lazy", implementation="reference")
    assert distance(reference_way.decode(ids, output="all"), exact) < 5e-5


def test_rank_and_bits_cost_what_they_should(checkpoint: Any, room: Path, tmp_path: Path) -> None:
    """Distance to the original through the compressed cache, token by token: less kept is further away."""
    directory, ids = checkpoint("llama"), token_ids(N)
    exact = logits(load(directory), ids)

    def error(keep: float, **options: Any) -> float:
        model = run(directory, tmp_path / f"{keep}.gguf", *arguments(room, keep, "--prefill", "eager"))
        return distance(one_by_one(session(model, **options), ids), exact)

    wide = {"kv": "f16", "kv_recent": "f16"}
    assert error(1.0, **wide) < 1e-3
    assert 0.01 < error(0.9, **wide) < error(0.75, **wide)
    assert error(0.75, recent=0, **wide) > error(0.75, **wide) > error(0.75, recent_ratio=0.5, **wide)
    assert error(0.75) > error(0.75, kv="q4") > error(0.75, **wide)


def test_the_file_and_its_report_say_what_was_planned(checkpoint: Any, room: Path, tmp_path: Path) -> None:
    directory, output = checkpoint("llama"), tmp_path / "out.gguf"
    options = [
        "--group",
        "all",
        "--sink",
        "8",
        "--recent-ratio",
        "0.25",
        "--kv-recent",
        "q8",
        "--kv-middle",
        "q3",
    ]
    convert(parse([str(directory), "-o", str(output), "--no-plot", *arguments(room, 0.75, *options)], "test"))
    found = keys(output)
    assert found["latentkv.regions.sink"] == 8
    assert found["latentkv.regions.recent_ratio"] == 0.25
    assert found["latentkv.regions.recent_format"] == "q8"
    assert "latentkv.regions.sink_format" not in found
    assert found["latentkv.v.ranks"] == [32] * 3
    assert "latentkv.v.segment_widths" not in found
    assert found["latentkv.v.segment_formats"] == ["q3"] * 3
    assert found["latentkv.k.segment_formats"] == ["q3"] * 6
    report = json.loads(output.with_suffix(".report.json").read_text(encoding="utf-8"))
    assert report["keep"] == 0.75
    assert 0.2 < report["layers"][0]["v"]["energy"] < 1
    model = core.Model(str(output))
    assert model.regions["recent_format"] == "q8"
    for fmt in ("f16", "q4"):
        uniform = session(model, kv=fmt, recent=0).kv_bytes()["per_token"] - 12
        assert report["bytes_per_token"][fmt] == uniform
    assert session(model, kv="f16").kv_bytes() == session(model, kv="f16", kv_recent="f16").kv_bytes()
    assert session(model, kv="q2").kv_bytes() == session(model, kv="q2", kv_recent="q8").kv_bytes()
    assert report["bytes_per_token"]["plan"] == session(model).kv_bytes()["per_token"] - 12


def test_the_middle_may_keep_k_per_channel(checkpoint: Any, room: Path, tmp_path: Path) -> None:
    """As in KIVI: K in blocks of 32 tokens, V per token in as many bits; a lazy prompt fills them too."""
    directory, output, ids = checkpoint("llama"), tmp_path / "out.gguf", token_ids(200)
    options = arguments(room, 0.75, "--kv-middle", "c3", "--group", "all", "--outtype", "f32")
    convert(parse([str(directory), "-o", str(output), "--no-plot", *options], "test"))
    found = keys(output)
    assert found["latentkv.k.segment_formats"] == ["c3"] * 6
    assert found["latentkv.v.segment_formats"] == ["q3"] * 3
    model = core.Model(str(output))
    report = json.loads(output.with_suffix(".report.json").read_text(encoding="utf-8"))
    per_token = session(model).kv_bytes()["per_token"] - 12
    # the file's ratio is an f32
    assert report["bytes_per_token"]["plan"] == pytest.approx(per_token, rel=1e-6)
    exact = logits(load(directory), ids)
    for prefill in ("lazy", "eager"):
        live = session(model, prefill=prefill)
        start = live.decode(ids[:150], output="all")
        assert (distance(start, exact[:150]) < 5e-5) == (prefill == "lazy")
        one_by_one(live, ids[150:])
        held = {region["name"]: region["used"] for region in live.kv_bytes()["regions"]}
        assert held == {"sink": 4, "recent": 196 - 160, "middle": 160}
    with pytest.raises(ValueError, match=r"^\[recent\] expected recent tokens, --recent 1 or more"):
        session(model, recent=0)


def test_a_file_with_blocks_where_none_can_be_is_refused(checkpoint: Any, room: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    run(checkpoint("llama"), output, *arguments(room, 0.75, "--kv-middle", "c3", "--kv-recent", "q4"))
    good = output.read_bytes()
    for old, new, message in (
        (b"q3", b"c3", r"^\[latentkv\.v\.segment_formats\] expected formats of single tokens for V; got c3"),
        (b"q4", b"c4", r"^\[latentkv\.regions\.recent_format\] expected a row format that stores single"),
        (b"c3", b"c7", r"^\[latentkv\.k\.segment_formats\] expected a known row format"),
        (b"c3", b"g3", r"^\[latentkv\.k\.segment_formats\] expected a known row format"),
        (
            np.float32(0.1).tobytes(),
            np.float32(0).tobytes(),
            r"^\[latentkv\.k\.segment_formats\] expected .*recent_ratio above 0 beside blocks .*got c3",
        ),
    ):
        # strings carry their length before them; the ratio follows its key and type
        before = len(old).to_bytes(8, "little") if old.isalnum() else b"regions.recent_ratio\x06\0\0\0"
        assert before + old in good
        output.write_bytes(good.replace(before + old, before + new))
        with pytest.raises(ValueError, match=message):
            core.Model(str(output))
        shown = subprocess.run(
            [sys.executable, "-m", "latentkv", "info", str(output)], capture_output=True, text=True
        )
        assert shown.returncode == 2
        assert shown.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-middle", "c2", "--recent-ratio", "0"], r"^\[--recent\] expected recent tokens beside c2"),
        (["--keep", "0.5"], r"^\[--keep\] expected at least 0\.75 \(K whole, rank 16 of V\); got 0\.5"),
        (["--group", "3"], r"^\[--group\] expected a divisor"),
    ],
)
def test_what_does_not_fit_is_refused(
    options: list[str], message: str, checkpoint: Any, room: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint("llama"), tmp_path / "out.gguf", "--method", "tale", *options)


@pytest.mark.parametrize("bad", [["--recent-ratio", "1.5"], ["--sink", "-1"], ["--kv-middle", "q7"]])
def test_bad_options_are_refused(bad: list[str], tmp_path: Path) -> None:
    with pytest.raises(LatentKVError, match=r"^\[--"):
        parse([str(tmp_path), "-o", str(tmp_path / "out.gguf"), "--method", "tale", *bad], "test")
