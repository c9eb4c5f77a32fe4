"""K-quants: which tensor gets which type, what the importance matrix is, and that it helps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from both import core, distance, session, token_ids
from gguf_files import plain, rewritten
from test_gguf_source import CALIBRATED, K_QUANTS, WIDE, converted, logits, tensor_bytes

from conftest import DEMO, Tiny, keys
from latentkv_convert import calibrate
from latentkv_convert.calibrate.decoder import Decoder
from latentkv_convert.cli import main, parse
from latentkv_convert.source.checkpoint_source import CheckpointSource
from latentkv_convert.source.gguf_source import GgufSource
from latentkv_convert.weights.encoding import Encoding
from latentkv_convert.weights.mixes import BASE, Mix
from latentkv_convert.weights.tensor import OutTensor

NONE = ["--method", "none"]
# llama-quantize's choice for 32 layers of the llama architecture with 8 KV heads for 32 query heads
MORE_BITS = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}


def mix(outtype: str, **changed: Any) -> Mix:
    model = {"architecture": "llama", "n_layer": 32, "n_group": 4, "tied": False, "important": True}
    return Mix(outtype, **(model | changed))


def types(of: Mix, role: str, width: int = 4096) -> list[str]:
    return [of.type_of(role, layer, (1024, width)) for layer in range(of.n_layer)]


@pytest.mark.parametrize(
    ("outtype", "base", "more"),
    [("q4_k_m", "q4_k", "q6_k"), ("q5_k_m", "q5_k", "q6_k"), ("q6_k", "q6_k", "q6_k")],
)
def test_mixes_are_llama_cpps(outtype: str, base: str, more: str) -> None:
    own = mix(outtype)
    for role in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
        assert set(types(own, role)) == {base}
    expected = [more if layer in MORE_BITS else base for layer in range(32)]
    assert types(own, "attn_v") == expected
    assert types(own, "ffn_down") == expected
    assert own.type_of("token_embd", None, (9, 4096)) == base
    assert own.type_of("output", None, (9, 4096)) == "q6_k"
    assert mix(outtype, tied=True).type_of("token_embd", None, (9, 4096)) == "q6_k"
    assert own.type_of("position_embd", None, (9, 4096)) == "f16"


def test_mixes_of_other_shapes() -> None:
    assert set(types(mix("iq4_xs"), "attn_v")) == {"q5_k"}
    assert set(types(mix("iq4_xs", n_group=1), "attn_v")) == {"iq4_xs"}
    assert set(types(mix("iq4_xs"), "ffn_down")) == {"iq4_xs"}
    assert types(mix("iq4_xs", important=False), "ffn_down") == ["q5_k"] * 4 + ["iq4_xs"] * 28
    assert set(types(mix("q4_k_m"), "attn_qkv")) == {"q5_k"}
    assert set(types(mix("q5_k_m"), "attn_qkv")) == {"q6_k"}
    assert types(mix("q4_k_m", n_layer=80), "attn_v")[10:13] == ["q5_k", "q5_k", "q6_k"]
    falcon = mix("q4_k_m", architecture="falcon")
    assert types(falcon, "ffn_down")[:7] == ["q6_k", "q6_k", "q5_k", "q5_k", "q4_k", "q4_k", "q5_k"]
    assert falcon.type_of("output", None, (9, 4096)) == "q8_0"


@pytest.mark.parametrize(
    ("outtype", "kinds"),
    [
        ("q4_k_m", {"q5_0", "q8_0"}),
        ("q5_k_m", {"q5_1", "q8_0"}),
        ("q6_k", {"q8_0"}),
        ("iq4_xs", {"iq4_nl", "q8_0"}),
    ],
)
def test_narrow_rows_take_smaller_blocks(
    outtype: str, kinds: set[str], tiny: Tiny, calib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of 96 and 160: one line says so, and the file is a model."""
    out, given = tmp_path / "out.gguf", ["--calib", str(calib), *CALIBRATED[:6]]
    directory = tiny(hidden_size=96, intermediate_size=160)
    capsys.readouterr()
    assert main([str(directory), "-o", str(out), *NONE, "--outtype", outtype, *given]) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warned) == 1
    assert f"expected rows of a multiple of 256 for {outtype}; got 96; " in warned[0]
    assert {kind for kind, _, _ in tensor_bytes(out).values()} == kinds | {"f32"}
    assert keys(out)["general.file_type"] == {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "iq4_xs": 30}[outtype]
    ids = token_ids(60)
    got = session(core.Model(str(out))).decode(ids, output="all")
    exact = logits(CheckpointSource(directory), ids)
    assert distance(got, exact) < {"q6_k": 0.1, "q5_k_m": 0.4}.get(outtype, 0.7)


@pytest.mark.parametrize("outtype", list(BASE))
def test_from_a_gguf_and_from_its_checkpoint(outtype: str, tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    """The same bytes, factors included."""
    directory = tiny(**WIDE)
    options = ["--outtype", outtype, "--kv-budget", "40%", "--recent", "32", *CALIBRATED]
    source = plain(directory, tmp_path / "plain.gguf")
    theirs = tensor_bytes(converted(directory, tmp_path / "theirs.gguf", calib, *options))
    ours = tensor_bytes(converted(source, tmp_path / "ours.gguf", calib, *options))
    assert ours == theirs
    base = BASE[outtype]
    assert ours["blk.1.attn_q.weight"][0] == base
    assert ours["blk.1.attn_v_b.weight"][0] == "f16"


def test_types_that_fit_already_are_copied(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    source = rewritten(plain(tiny(**WIDE), tmp_path / "plain.gguf"), tmp_path / "mixed.gguf", K_QUANTS)
    out = converted(source, tmp_path / "out.gguf", calib, *NONE, "--outtype", "q4_k_m", *CALIBRATED)
    before, after = tensor_bytes(source), tensor_bytes(out)
    same = {name for name in before if before[name] == after[name]}
    assert {name for name in before if before[name][0] == after[name][0]} == same
    assert {"blk.0.attn_q.weight", "blk.0.attn_norm.weight", "output.weight"} <= same
    assert after["blk.0.ffn_up.weight"][0] == "q4_k" != before["blk.0.ffn_up.weight"][0]


@pytest.mark.parametrize("factor_type", ["f32", "f16", "q8_0", None])
def test_factors_have_a_type_of_their_own(
    factor_type: str | None, tiny: Tiny, calib: Path, tmp_path: Path
) -> None:
    given = [] if factor_type is None else ["--factor-type", factor_type]
    options = ["--method", "palu", "--outtype", "q6_k", *given, *CALIBRATED]
    out = tensor_bytes(converted(tiny(**WIDE), tmp_path / "out.gguf", calib, *options))
    assert out["blk.0.attn_k_a.weight"][0] == factor_type or "q8_0"
    assert out["blk.0.attn_k_b.weight"][0] == ("f32" if factor_type == "f32" else "f16")
    assert out["blk.0.attn_q.weight"][0] == "q6_k"


def inputs(directory: Path, tokens: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Mean squares by hooks on the whole model at once."""
    decoder, seen = Decoder(CheckpointSource(directory)), []
    for layer in decoder.layers:
        rows: dict[str, np.ndarray] = {}
        for name, module in layer.named_children():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(partial(note, rows, name))
        seen.append(rows)
    with torch.no_grad():
        decoder(torch.from_numpy(tokens))
    return [{name: np.square(x).mean((0, 1)) for name, x in rows.items()} for rows in seen]


def note(rows: dict[str, np.ndarray], name: str, module: Any, x: tuple[torch.Tensor]) -> None:
    rows[name] = x[0].double().numpy()


@pytest.mark.parametrize(
    ("method", "reduced"), [("none", False), ("none", True), ("palu", False), ("waterfill", True)]
)
def test_importance_is_the_mean_square_of_what_a_weight_reads(
    method: str, reduced: bool, tiny: Tiny, calib: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whichever pass comes first, and from the store; with products of bf16 nearly."""
    monkeypatch.setattr(calibrate, "multiplies_bf16", lambda device: reduced)
    rtol = 0.05 if reduced else 1e-4
    directory, source = tiny(), CheckpointSource(tiny(name="same"))
    chosen = ["--method", method, "--calib", str(calib), *CALIBRATED]
    recipe = parse([str(directory), "-o", "unused.gguf", *chosen], "test")
    needs = {"none": (), "palu": ("moments", "fisher"), "waterfill": ("copies",)}[method]
    if method == "waterfill":
        recipe.options.update(sink=0, recent=32)  # type: ignore[attr-defined]
    stats, sample = calibrate.collect(needs, recipe, source, activations=True)
    assert (sample is None) == (method == "none")
    again, _ = calibrate.collect(needs, recipe, source, activations=True)
    alone, _ = calibrate.collect(
        (), parse([str(directory), "-o", "x", *NONE, *chosen[2:]], "t"), source, True
    )
    found = stats["activations"]
    spec, encoding = source.spec, Encoding.of(source.spec, "q4_k_m", importance=found)
    for layer, arrays in enumerate(found):
        assert set(arrays) == {"attn_q", "attn_output", "ffn_up", "ffn_down"}
        for name, array in arrays.items():
            assert np.array_equal(array, again["activations"][layer][name])
            assert np.corrcoef(array, alone["activations"][layer][name])[0, 1] > 0.6
        for stem, of in (("attn_v", "attn_q"), ("ffn_gate", "ffn_up"), ("ffn_down", "ffn_down")):
            weight = OutTensor(f"blk.{layer}.{stem}.weight", (4, len(arrays[of])), "weight", lambda: None)  # type: ignore[arg-type,return-value]
            importance = encoding.importance_of(weight)
            assert importance is not None
            assert importance.mean() == pytest.approx(1, rel=1e-5)
    if method == "none":
        text = calibrate.encode(calibrate.read_texts([calib]), source)
        read = calibrate.Sample.draw(text, 1024, min(128, spec.n_ctx), 0)
        for arrays, expected in zip(found, inputs(directory, read.tokens), strict=True):
            for name, array in arrays.items():
                assert np.allclose(array, expected[name], rtol=rtol)
            assert np.allclose(arrays["attn_q"], expected["attn_v"], rtol=rtol)


def test_importance_lowers_the_error_of_products() -> None:
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((64, 512)).astype(np.float32)
    scales = np.exp(1.5 * rng.standard_normal(512))
    x = rng.standard_normal((2000, 512)) * scales
    gguf = pytest.importorskip("gguf")
    for kind in ("q4_k", "q5_k", "iq4_xs", "q5_0", "iq4_nl"):
        errors = []
        for importance in (None, np.square(scales).astype(np.float32)):
            blocks = core.quantize(weights, kind, importance)
            back = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind.upper()])
            errors.append(np.linalg.norm(x @ (back - weights).T))
        assert errors[1] < 0.95 * errors[0], kind
    with pytest.raises(ValueError, match=r"^\[quantize\] expected the importance of 512 columns; got 511"):
        core.quantize(weights, "q4_k", np.ones(511, np.float32))


def test_the_demo_model_in_four_bits(tmp_path: Path) -> None:
    """With importance it is nearer to its logits than without."""
    calib, ids = DEMO / "sample-calib.txt", token_ids(200)
    exact, apart = logits(CheckpointSource(DEMO), ids), []
    for option in ("--imatrix", "--no-imatrix"):
        out = tmp_path / "out.gguf"
        options = [*NONE, "--outtype", "iq4_xs", option, "--calib", str(calib), "--calib-tokens", "6144"]
        assert main([str(DEMO), "-o", str(out), *options]) == 0
        apart.append(distance(logits(GgufSource(out), ids), exact))
    assert apart[0] < 0.97 * apart[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--outtype", "q8_0", "--no-imatrix"],
            "[--no-imatrix] expected --outtype q4_k_m, q5_k_m, q6_k, iq4_xs",
        ),
        (
            ["--outtype", "q4_k_m", "--imatrix"],
            "[--imatrix] expected a text to measure it on, --calib FILE; got",
        ),
    ],
)
def test_options_that_would_change_nothing(
    options: list[str], message: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, out = tiny(), tmp_path / "out.gguf"
    capsys.readouterr()
    assert main([str(directory), "-o", str(out), *NONE, *options]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_without_a_text_one_line_says_so(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, out = tiny(**WIDE), tmp_path / "out.gguf"
    for options, n_lines in (([], 1), (["--no-imatrix"], 0)):
        capsys.readouterr()
        assert main([str(directory), "-o", str(out), *NONE, "--outtype", "q5_k_m", *options]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
        assert len(lines) == n_lines
        assert all("[--calib] expected a text for the importance matrix of q5_k_m" in line for line in lines)


def test_experts_are_quantized_by_what_they_read(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    """All of a layer's with one importance, of the tokens that were sent to any of them."""
    directory = tiny("qwen3_moe", **WIDE, moe_intermediate_size=256)
    options = ["--outtype", "q4_k_m", "--kv-budget", "40%", "--recent", "32", *CALIBRATED]
    out = converted(directory, tmp_path / "out.gguf", calib, *options)
    kinds = {name: kind for name, (kind, *_) in tensor_bytes(out).items()}
    assert {kinds[f"blk.{layer}.ffn_up_exps.weight"] for layer in range(2)} == {"q4_k"}
    assert {kinds[f"blk.{layer}.ffn_gate_exps.weight"] for layer in range(2)} == {"q4_k"}
    assert {kinds[f"blk.{layer}.ffn_down_exps.weight"] for layer in range(2)} == {"q4_k", "q6_k"}
    assert kinds["blk.0.ffn_gate_inp.weight"] == "f32"
    blind = converted(directory, tmp_path / "blind.gguf", calib, *options, "--no-imatrix")
    name = "blk.1.ffn_up_exps.weight"
    assert tensor_bytes(out)[name] != tensor_bytes(blind)[name]
    ids = token_ids(60)
    got = session(core.Model(str(out)), kv="f16").decode(ids, output="all")
    assert distance(got, logits(CheckpointSource(directory), ids)) < 0.7
