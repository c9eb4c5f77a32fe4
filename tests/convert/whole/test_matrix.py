"""Every architecture x method x K path that is legal: full rank is the original; cut, the runtime computes
what torch computes with the truncated factors; what is not legal is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
from both import distance, load, logits, run, session, step_by_step, token_ids

from conftest import TEXT, Tiny
from latentkv.errors import LatentKVError
from latentkv_convert import calibrate
from latentkv_convert.cli import parse
from latentkv_convert.errors import ConvertError
from latentkv_convert.ir import SIDES, Plan
from latentkv_convert.plan import methods
from latentkv_convert.source.checkpoint_source import CheckpointSource
from latentkv_convert.weights.encoding import Encoding
from latentkv_convert.work import Work

N = 120  # tokens: longer than every sliding window below

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-head-80": ("llama", {"head_dim": 80, "attention_bias": True}),
    "qwen2": ("qwen2", {"hidden_size": 192}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3.5": ("qwen3_5", {}),
    "qwen3.5-moe": ("qwen3_5_moe", {}),
    "qwen3-next": ("qwen3_next", {}),
    "gpt-oss": ("gpt_oss", {}),
    "mistral": ("mistral", {}),
    "mistral3": ("mistral3", {}),
    "gemma3": ("gemma3_text", {"hidden_activation": "gelu"}),  # erf: ggml's table of the tanh form is f16
    "gemma2": ("gemma2", {"hidden_activation": "gelu"}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {}),
    "glm4": ("glm4", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "layer_types": None}),
    "phi3-partial-head-96": (
        "phi3",
        {
            "hidden_size": 192,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.5,
            "rope_scaling": None,
        },
    ),
    "phi3": ("phi3", {"original_max_position_embeddings": 64}),
    "falcon": ("falcon", {}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "opt": ("opt", {}),
    "mpt": ("mpt", {}),
}
NO_ROPE = ("opt", "mpt")

REBUILD = {
    "palu-head": ["palu", "--group", "1", "--allocate", "uniform"],
    "palu-joint-plain": ["palu", "--group", "all", "--basis", "plain", "--allocate", "fisher"],
    "lorc": ["lorc"],
    "eigen-shared": ["eigen"],
    "eigen-head": ["eigen", "--k-basis", "head", "--allocate", "spectrum"],
}
ROTATED = {
    "zack": ["zack"],
    "zack-joint": ["zack", "--group", "all", "--basis", "k", "--allocate", "spectrum"],
    "zack-kq-svd": ["zack", "--basis", "kq-svd", "--allocate", "budget"],
    "zack-kq-svd-joint": ["zack", "--basis", "kq-svd", "--group", "all", "--allocate", "progressive"],
}


def cases() -> Iterator[Any]:
    """(model, K path, options); without RoPE `absorbed` is the default, the methods' own paths stay legal."""
    for model, (path, named) in itertools.product(MODELS, [("rebuild", REBUILD), ("rotated", ROTATED)]):
        for name, options in named.items():
            method = [*options]
            if model not in NO_ROPE:
                yield pytest.param(model, path, method, id=f"{model}-{path}-{name}")
                continue
            yield pytest.param(model, "absorbed", method, id=f"{model}-absorbed-{name}")
            if name in ("palu-head", "lorc", "eigen-shared", "zack", "zack-kq-svd-joint"):
                yield pytest.param(model, path, [*method, "--k-path", path], id=f"{model}-{path}-{name}")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and statistics, made once."""
    directory = tmp_path_factory.mktemp("matrix")
    (directory / "calib.txt").write_text(TEXT, encoding="utf-8")
    return directory


@pytest.fixture(autouse=True)
def shared_cache(own_cache: None, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(room / "cache"))


def checkpoint(room: Path, random_checkpoint: Tiny, name: str) -> Path:
    model_type, config = MODELS[name]
    if not (room / name).is_dir():
        random_checkpoint(room / name, model_type, **config)
    return room / name


def arguments(room: Path, method: list[str], keep: float) -> list[str]:
    text = ["--calib", str(room / "calib.txt"), "--calib-window", "128", "--calib-tokens", "1024"]
    return ["--method", *method, "--keep", str(keep), *text]


@pytest.mark.parametrize(("model", "path", "method"), list(cases()))
def test_full_rank_and_cut(
    model: str, path: str, method: list[str], room: Path, random_checkpoint: Tiny, tmp_path: Path
) -> None:
    directory, ids = checkpoint(room, random_checkpoint, model), token_ids(N)
    original = load(directory)
    exact = logits(original, ids)

    whole = run(directory, tmp_path / "whole.gguf", *arguments(room, method, 1.0))
    attending = [whole.layers[index] for index in CheckpointSource(directory).spec.attention_layers]
    assert {layer["k"]["path"] for layer in attending} == {path}
    assert {layer["v"]["path"] for layer in attending} == {"latent"}
    assert distance(session(whole).decode(ids, output="all"), exact) < 5e-5
    assert distance(session(whole, kv="f16").decode(ids, output="all"), exact) < 1e-3

    options = arguments(room, method, 0.6)
    cut = run(directory, tmp_path / "cut.gguf", *options)
    with reference.compressed(original, *planned(directory, options)) as truncated:
        expected = logits(truncated, ids)
    assert distance(expected, exact) > 0.05  # something was cut
    assert distance(session(cut).decode(ids, output="all"), expected) < 5e-5
    assert distance(step_by_step(cut, ids, N - 10), expected[N - 11 :]) < 5e-5


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-head-80", ["zack"]),
        ("llama-head-80", ["palu"]),
        ("phi3-partial-head-96", ["zack", "--group", "all", "--basis", "kq-svd"]),
        ("opt", ["zack"]),
        ("mpt", ["eigen"]),
        ("falcon-new", ["lorc"]),
    ],
)
def test_every_format_on_every_path(
    model: str, options: list[str], room: Path, random_checkpoint: Tiny, tmp_path: Path
) -> None:
    """Fewer bits, larger error; the fused op and the stock expression read the same rows (a last-bit
    difference may flip a code, which measures 0 to 0.03 of the quantization error)."""
    directory, ids = checkpoint(room, random_checkpoint, model), token_ids(N)
    cut = run(directory, tmp_path / "cut.gguf", *arguments(room, options, 0.6))
    exact = session(cut).decode(ids, output="all")
    errors = []
    for kv in ("q8", "q4", "q3", "q2"):
        fused, stock = (
            session(cut, kv=kv, implementation=name).decode(ids, output="all")
            for name in ("fused", "reference")
        )
        errors.append(distance(fused, exact))
        assert distance(fused, stock) < 0.2 * errors[-1]
    assert errors[0] < 0.03
    assert all(low * 1.5 < high for low, high in itertools.pairwise(errors))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", ["lorc", "--skip-layers", "1", "--no-rotate"]),
        ("phi3", ["lorc", "--skip-layers", "1"]),  # one layer packed, one not
        ("opt", ["lorc", "--skip-layers", "1"]),
        ("mpt", ["lorc", "--skip-layers", "1", "--steepest", "0"]),
        ("qwen3", ["eigen", "--published-counting", "--error-budget", "0.3"]),
        ("falcon-new", ["eigen", "--error-budget", "0.4"]),
        ("llama", ["zack", "--served-context", "4096", "--allocate", "uniform", "--no-rotate"]),
        ("phi3", ["zack", "--served-context", "64", "--basis", "kq-svd"]),
        ("mistral", ["palu", "--no-rotate", "--allocate", "budget"]),
    ],
)
def test_options_change_the_plan_and_not_what_it_means(
    model: str, options: list[str], room: Path, random_checkpoint: Tiny, tmp_path: Path
) -> None:
    directory, ids = checkpoint(room, random_checkpoint, model), token_ids(N)
    chosen = arguments(room, options, 0.7)
    work, plan = planned(directory, chosen)
    layers = run(directory, tmp_path / "cut.gguf", *chosen)
    assert [layer["k"]["path"] for layer in layers.layers] == [layer.k.path for layer in plan.layers]
    assert ("full" in {layer.k.path for layer in plan.layers}) == ("--skip-layers" in options)
    with reference.compressed(load(directory), work, plan) as truncated:
        expected = logits(truncated, ids)
    assert distance(session(layers).decode(ids, output="all"), expected) < 5e-5


@pytest.mark.parametrize("options", [["palu", "--group", "1", "--allocate", "spectrum"], ["zack"]])
def test_ranks_are_ragged_where_the_allocator_says_so(
    options: list[str], room: Path, random_checkpoint: Tiny
) -> None:
    directory = checkpoint(room, random_checkpoint, "llama-head-80")
    _, plan = planned(directory, arguments(room, options, 0.5))
    ranks = [rank for layer in plan.layers for side in SIDES for rank in layer.side(side).ranks]
    assert len(set(ranks)) > 1
    assert sum(ranks) == 0.5 * len(ranks) * 80


def test_the_comparison_sees_one_column(room: Path, random_checkpoint: Tiny, tmp_path: Path) -> None:
    """The bound of the matrix fails when a single latent channel of one layer is lost."""
    directory, ids = checkpoint(room, random_checkpoint, "llama"), token_ids(N)
    options = arguments(room, REBUILD["palu-head"], 0.6)
    got = session(run(directory, tmp_path / "cut.gguf", *options)).decode(ids, output="all")
    work, plan = planned(directory, options)
    last = plan.layers[-1]
    ranks = (last.v.ranks[0] - 1, *last.v.ranks[1:])
    less = replace(plan, layers=(*plan.layers[:-1], replace(last, v=replace(last.v, ranks=ranks))))
    with reference.compressed(load(directory), work, less) as truncated:
        assert distance(got, logits(truncated, ids)) > 1e-3


@pytest.mark.parametrize("model", ["llama", "qwen3", "phi3", "falcon"])
@pytest.mark.parametrize("method", ["palu", "lorc", "eigen", "zack"])
def test_absorbed_needs_keys_without_rope(
    model: str, method: str, room: Path, random_checkpoint: Tiny
) -> None:
    directory = checkpoint(room, random_checkpoint, model)
    own = "rotated" if method == "zack" else "rebuild"
    with pytest.raises(
        ConvertError, match=rf"^\[--k-path\] expected {own}, as keys go through RoPE; got absorbed$"
    ):
        planned(directory, arguments(room, [method, "--k-path", "absorbed"], 0.5))


@pytest.mark.parametrize(("method", "path"), [("palu", "rotated"), ("zack", "rebuild"), ("none", "rebuild")])
def test_a_path_of_another_method_is_refused(method: str, path: str, room: Path) -> None:
    with pytest.raises((LatentKVError, ConvertError), match=rf"got .*({path}|--method {method})"):
        parse([str(room), "-o", str(room / "out.gguf"), "--method", method, "--k-path", path], "test")


@pytest.mark.parametrize("method", ["palu", "lorc", "eigen", "zack"])
def test_clipped_keys_have_no_latent(
    method: str, random_checkpoint: Tiny, room: Path, tmp_path: Path
) -> None:
    directory = random_checkpoint(tmp_path / "clipped", "mpt", attn_config={"clip_qkv": 2.5})
    with pytest.raises(ConvertError, match=r"expected none: the checkpoint clips K and V to ±2\.5"):
        run(directory, tmp_path / "out.gguf", *arguments(room, [method], 0.5))


@pytest.mark.parametrize(
    ("model", "method", "shifts"),
    [("llama", "palu", True), ("llama", "zack", False), ("opt", "palu", False), ("mpt", "zack", True)],
)
def test_context_shift_needs_keys_that_hold_no_position(
    model: str, method: str, shifts: bool, room: Path, random_checkpoint: Tiny, tmp_path: Path
) -> None:
    directory = checkpoint(room, random_checkpoint, model)
    live = session(run(directory, tmp_path / "cut.gguf", *arguments(room, [method], 0.6)))
    live.decode(token_ids(40))
    live.seq_rm(0, 4, 12)
    if shifts:
        live.seq_add(0, 12, 40, -8)
        assert live.seq_pos_max(0) == 31
        return
    with pytest.raises(ValueError, match=r"^\[context shift\] expected"):
        live.seq_add(0, 12, 40, -8)


def planned(directory: Path, options: list[str]) -> tuple[Work, Plan]:
    """What a conversion with these options plans."""
    recipe = parse([str(directory), "-o", str(directory / "unused.gguf"), *options], "test")
    source = CheckpointSource(directory)
    recipe = methods.resolved(recipe, source.spec)
    method = methods.module(recipe.method).create(recipe.options, source.spec)
    stats, sample = calibrate.collect(method.needs, recipe, source)
    encoding = Encoding.of(source.spec, recipe.outtype or source.outtype)
    trains = recipe.finetune is not None
    work = Work(source, stats, recipe.seed, method.decompose, sample, encoding=encoding, trains=trains)
    return work, methods.planned(method, work)
