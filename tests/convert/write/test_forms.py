"""Files that keep exact tokens keep the projections: which tensors are written, that E of a projection is the
A that would have replaced it, and what both forms cost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_matrix import planned
from tiny_models import TINY

from conftest import keys, tensors
from latentkv_convert.cli import parse
from latentkv_convert.errors import ConvertError
from latentkv_convert.fuse.rotation import finished
from latentkv_convert.ir import FULL, SIDES, LayerPlan, Plan, SidePlan
from latentkv_convert.pipeline import convert
from latentkv_convert.recover import lora
from latentkv_convert.rows import plan_sizes
from latentkv_convert.source import archs
from latentkv_convert.weights.encoding import Encoding
from latentkv_convert.write import paths

Tiny = Callable[..., Path]
Tensors = dict[str, np.ndarray]
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True}),  # rows of RoPE planes are permuted
    ("qwen3", {}),  # a norm between projection and RoPE
    ("olmo2", {}),  # one over all heads
    ("phi3", {}),  # Q, K and V packed
    ("opt", {}),  # absorbed, with biases
    ("mpt", {}),
]


def words(room: Path, *options: str) -> list[str]:
    """A plan that drops channels, on little text."""
    small = ["--calib-window", "128", "--calib-tokens", "1024", "--recent", "32", "--segment", "16"]
    return ["--calib", str(room / "calib.txt"), *small, "--kv-budget", "12%", *options]


def tale(room: Path, *options: str) -> list[str]:
    text = ["--calib", str(room / "calib.txt"), "--calib-window", "128", "--calib-tokens", "1024"]
    return ["--method", "tale", "--keep", "0.75", "--group", "all", *text, *options]


def written(directory: Path, room: Path, options: list[str], outtype: str = "f32") -> tuple[Tensors, Any]:
    """Tensors and keys of the converted file."""
    out = room / "out.gguf"
    convert(parse([str(directory), "-o", str(out), "--no-plot", "--outtype", outtype, *options], "test"))
    return tensors(out), keys(out)


def of_layer(found: Tensors, layer: int) -> set[str]:
    """`k_e.weight`, `v.bias`, …: what a layer has of K, V and what maps queries."""
    names = {
        name.removeprefix(f"blk.{layer}.attn_") for name in found if name.startswith(f"blk.{layer}.attn_")
    }
    return {name for name in names if name[:2] in ("k.", "k_", "v.", "v_") or name == "q_e.weight"} - {
        "k_norm.weight"
    }


def encoded(found: Tensors, layer: int, side: str, x: np.ndarray, ranks: tuple[int, ...]) -> np.ndarray:
    """E x_g of every group, x [w, n]: [Σr, n]."""
    e = np.split(found[f"blk.{layer}.attn_{side}_e.weight"], np.cumsum(ranks)[:-1])
    return np.concatenate([part @ heads for part, heads in zip(e, np.split(x, len(ranks)), strict=True)])


def near(got: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.linalg.norm(got - expected) < 1e-5 * np.linalg.norm(expected))


@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize(
    "chosen_for",
    [
        ["--prefer", "size"],
        ["--prefer", "speed", "--kv-budget", "11%"],
        ["--group", "1", "--group-v", "1", "--kv-budget", "16%"],
    ],
    ids=str,
)
def test_the_encoder_behind_the_projection_is_the_a_it_stands_for(
    chosen_for: list[str], model: str, config: dict[str, Any], tiny: Tiny, room: Path, always: None
) -> None:
    directory, options = tiny(model, **config), words(room, *chosen_for, "--outtype", "f32")
    found, _ = written(directory, room, options)
    work, plan = planned(directory, options)
    for index, layer in enumerate(plan.layers):
        for side in SIDES:
            chosen = layer.side(side)
            job = paths.SideJob(work, index, side, chosen, "a", lambda: finished(work, chosen, index, side))  # noqa: B023
            a, *offset = (tensor.load() for tensor in paths.down(job))
            projection = found[f"blk.{index}.attn_{side}.weight"]
            assert near(encoded(found, index, side, projection, chosen.ranks), a)
            shape = (sum(chosen.ranks), chosen.group * work.spec.head_dim)
            assert found[f"blk.{index}.attn_{side}_e.weight"].shape == shape
            assert sum(chosen.ranks) < work.spec.kv_width
            if chosen.path != "rotated":
                bias = found[f"blk.{index}.attn_{side}_e.bias"]
                assert near(encoded(found, index, side, bias[:, None], chosen.ranks)[:, 0], offset[0])


@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize("prefer", ["size", "speed"])
def test_exact_tokens_leave_the_projections_in_the_file(
    prefer: str, model: str, config: dict[str, Any], tiny: Tiny, room: Path
) -> None:
    found, described = written(tiny(model, **config), room, words(room, "--prefer", prefer))
    back = {"rebuild": "k_b.weight", "rotated": "q_e.weight", "absorbed": "q_e.weight"}
    for layer, path in enumerate(described["latentkv.k.path"]):
        expected = {"k.weight", "k_e.weight", back[path], "v.weight", "v_e.weight", "v_b.weight"}
        if config or model == "opt":
            expected |= {"v.bias"} if path == "absorbed" else {"k.bias", "v.bias"}
        assert of_layer(found, layer) - {"k_e.bias", "v_e.bias"} == expected


@pytest.mark.parametrize("prefer", ["size", "speed"])
def test_what_a_plan_drops_is_in_no_factor(prefer: str, tiny: Tiny, room: Path) -> None:
    found, described = written(tiny(), room, words(room, "--prefer", prefer, "--kv-budget", "16%"))
    for side in "kv":
        ranks, counts = (described[f"latentkv.{side}.{name}"] for name in ("ranks", "segment_counts"))
        ends = np.cumsum(counts)[:-1]
        widths = np.split(np.array(described[f"latentkv.{side}.segment_widths"]), ends)
        assert "none" not in described[f"latentkv.{side}.segment_formats"]
        assert ranks == [sum(each) for each in widths]
        assert min(ranks) < 64
        for layer, rank in enumerate(ranks):
            assert found[f"blk.{layer}.attn_{side}_e.weight"].shape == (rank, 64)
    for layer, (k, v) in enumerate(
        zip(described["latentkv.k.ranks"], described["latentkv.v.ranks"], strict=True)
    ):
        assert found[f"blk.{layer}.attn_v_b.weight"].shape == (64, v)
        if prefer == "size":
            assert found[f"blk.{layer}.attn_k_b.weight"].shape == (64, k)
        else:
            assert found[f"blk.{layer}.attn_q_e.weight"].shape == (2, k, 32)


@pytest.mark.parametrize("prefer", ["size", "speed"])
def test_a_master_keeps_all_channels(prefer: str, tiny: Tiny, room: Path) -> None:
    found, described = written(tiny(), room, words(room, "--prefer", prefer, "--master"))
    assert "none" in described["latentkv.k.segment_formats"] + described["latentkv.v.segment_formats"]
    for side in "kv":
        assert described[f"latentkv.{side}.ranks"] == [64] * 3
        for layer in range(3):
            assert found[f"blk.{layer}.attn_{side}_e.weight"].shape == (64, 64)
            assert f"blk.{layer}.attn_{side}.weight" in found


def test_without_exact_tokens_factors_replace_the_projections(tiny: Tiny, room: Path) -> None:
    none = ["--sink", "0", "--recent", "0"]
    directory = tiny()
    for prefer, k in (
        ("size", {"k_a.weight", "k_b.weight"}),
        ("speed", {"k.weight", "k_e.weight", "q_e.weight"}),
    ):
        found, described = written(directory, room, words(room, "--prefer", prefer, *none))
        assert of_layer(found, 1) == k | {"v_a.weight", "v_b.weight"}
        formats = described["latentkv.k.segment_formats"] + described["latentkv.v.segment_formats"]
        assert "none" not in formats  # nothing would read it
        assert found["blk.1.attn_v_a.weight"].shape == (described["latentkv.v.ranks"][1], 96)


def test_a_trained_a_stays_in_the_file(tiny: Tiny, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "WINDOW", 64)
    training = ["--finetune", str(room / "calib.txt"), "--steps", "1", "--lora-rank", "4"]
    options = words(room, "--prefer", "size", *training)
    found, described = written(tiny(), room, [*options, "--kv-budget", "99%"])
    assert described["latentkv.regions.recent"] == 32
    assert of_layer(found, 0) == {"k_a.weight", "k_b.weight", "v_a.weight", "v_b.weight"}
    with pytest.raises(
        ConvertError, match="expected a plan that stores all its columns; got dropped segments"
    ):
        written(tiny(name="other"), room, options)


def test_tale_keeps_whole_values_beside_truncated_ones(tiny: Tiny, room: Path) -> None:
    directory = tiny(num_key_value_heads=4)
    found, described = written(directory, room, tale(room))
    assert of_layer(found, 2) == {"k.weight", "v.weight", "v_e.weight", "v_b.weight"}
    assert described["latentkv.v.ranks"] == [64] * 3
    assert described["latentkv.v.segment_formats"] == ["q2"] * 3
    assert found["blk.2.attn_v_e.weight"].shape == (64, 128)
    # a prompt has nothing exact to attend to but the latent itself
    found, described = written(directory, room, tale(room, "--sink", "0", "--recent-ratio", "0"))
    assert of_layer(found, 2) == {"k.weight", "v_a.weight", "v_b.weight"}
    assert described["latentkv.v.ranks"] == [128] * 3
    assert described["latentkv.v.segment_formats"] == ["q2", "none"] * 3


@pytest.mark.parametrize("outtype", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize(
    "options", [["--prefer", "size"], ["--prefer", "speed"], ["--sink", "0", "--recent", "0"]]
)
def test_added_weights_are_those_of_the_file(
    options: list[str], outtype: str, tiny: Tiny, room: Path
) -> None:
    from gguf import GGUFReader

    written(tiny(), room, words(room, *options), outtype)

    def cached(path: Path) -> int:
        parts = ("attn_k", "attn_v", "attn_q_e")
        every = GGUFReader(path).tensors
        return sum(int(t.n_bytes) for t in every if any(part in t.name for part in parts))

    size = cached(room / "out.gguf")
    report = json.loads((room / "out.report.json").read_text())
    written(room / "tiny", room, ["--method", "none"], outtype)
    assert report["added_weight_bytes"] == size - cached(room / "out.gguf")


SPEC = archs.model_spec(TINY["llama"])  # 3 layers, 2 KV heads of 32
REBUILD = SidePlan("rebuild", 2, (48,), ((32, 16),), (("q4", "q2"),))
ROTATED, LATENT = (dataclasses.replace(REBUILD, path=path) for path in ("rotated", "latent"))


def exact_row(plan: Plan, fmt: str) -> float:
    """Bytes of one exact token."""
    own = dataclasses.replace(plan, sink=4, sink_format=fmt)
    sinks = plan_sizes.kv_bytes(SPEC, own, 1024)["regions"][0]
    return float((sinks["k"] + sinks["v"]) / sinks["slots"])


def test_an_exact_token_costs_full_rows() -> None:
    plan = Plan((LayerPlan(REBUILD, LATENT),) * 3, sink=4, recent=64)
    assert exact_row(plan, "f16") == 3 * 2 * 64 * 2
    assert exact_row(plan, "q4") == 3 * 2 * 2 * (4 + 16)
    assert plan_sizes.bytes_per_token(SPEC, plan, None, 4096) == 3 * 2 * (4 + 16 + 4 + 4)
    slots = (16 + 224, 4096)
    assert plan_sizes.kv_bytes(SPEC, plan, 4096)["total"] == slots[0] * (768 + 12) + slots[1] * (168 + 12)
    ratio = dataclasses.replace(plan, recent=0, recent_ratio=0.5, recent_format="q8")
    assert plan_sizes.planned_bytes_per_token(SPEC, ratio, 4096) == 0.5 * 168 + 0.5 * 3 * 2 * 2 * 36


@pytest.mark.parametrize("k", [REBUILD, ROTATED, FULL], ids=lambda side: side.path)
def test_an_exact_token_is_a_row_of_latents_beside_a_side_of_form_a(k: SidePlan) -> None:
    plan = Plan((LayerPlan(k, LATENT),) * 3, recent=64, trained=True)
    width = 64 if k is FULL else 48
    assert exact_row(plan, "f16") == 3 * 2 * (width + 48)


@pytest.mark.parametrize(
    ("outtype", "row"), [("f32", 4 * 96), ("f16", 2 * 96), ("q8_0", 34 * 3), ("q4_k_m", 34 * 3)]
)
def test_a_channel_weighs_its_row_and_its_column(outtype: str, row: int) -> None:
    """Of A [1, 96] in the weights' precision, or E [1, 64], and of B [64, 1]."""
    encoding, element = Encoding.of(SPEC, outtype), 4 if outtype == "f32" else 2
    assert encoding.channel_bytes("a", 64, 96) == row + 64 * element
    assert encoding.channel_bytes("e", 64, 96) == 2 * 64 * element
