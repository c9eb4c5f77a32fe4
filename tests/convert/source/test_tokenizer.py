"""tokenizer.* keys of the three families, against the tokenizers they come from."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import TEXT, keys
from latentkv_convert.cli import main
from latentkv_convert.errors import ConvertError
from latentkv_convert.source import tokenizer
from latentkv_convert.source.checkpoint import Checkpoint
from latentkv_convert.source.tokenizer import pre
from latentkv_convert.source.tokenizer.files import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

Tiny = Callable[..., Path]
HARD = "  Tabs\tand\n\nlines, it's 12345 or 3.14; naïve café 東京 🚀 don't SHOUT\r\n  x = {'a': [1,2]}  "


def sentencepiece_model(directory: Path, kind: str) -> Any:
    """Trains tokenizer.model (bpe or unigram, byte fallback) and returns its processor."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")),
        model_writer=model,
        model_type=kind,
        vocab_size=420,
        byte_fallback=kind == "bpe",
        normalization_rule_name="identity" if kind == "bpe" else "nmt_nfkc",  # as Llama's and T5's models
        remove_extra_whitespaces=kind != "bpe",
        character_coverage=1.0 if kind == "bpe" else 0.9995,
        minloglevel=2,
    )
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def test_demo_is_byte_level_bpe(demo: Path) -> None:
    checkpoint = Checkpoint(demo)
    found = tokenizer.keys(demo, checkpoint.config, 8192)
    source = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == "dbrx"  # Llama 3's splits, without looking whole words up first
    assert found["tokenizer.ggml.tokens"][:4] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    assert found["tokenizer.ggml.token_type"][:5] == [CONTROL] * 4 + [NORMAL]
    assert found["tokenizer.ggml.merges"] == [" ".join(pair) for pair in source["model"]["merges"]]
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.eos_token_id"]) == (0, 2)
    assert not found["tokenizer.ggml.add_bos_token"]
    assert found["tokenizer.chat_template"] == (demo / "chat_template.jinja").read_text(encoding="utf-8")


def test_ids_past_the_tokenizer_are_unused(tiny: Tiny) -> None:
    found = tokenizer.keys(tiny(), {}, 330)
    assert len(found["tokenizer.ggml.tokens"]) == 330
    assert found["tokenizer.ggml.token_type"][320:] == [UNUSED] * 10
    assert len(set(found["tokenizer.ggml.tokens"])) == 330
    with pytest.raises(ConvertError, match="token ids below vocab_size 300"):
        tokenizer.keys(tiny(), {}, 300)


def test_bos_from_the_post_processor_or_the_setting(tiny: Tiny) -> None:
    directory = tiny()
    assert tokenizer.keys(directory, {}, 320)["tokenizer.ggml.add_bos_token"]
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps({"bos_token": "<|begin|>", "add_bos_token": False}))
    assert not tokenizer.keys(directory, {}, 320)["tokenizer.ggml.add_bos_token"]


def test_user_defined_tokens_are_not_control(tiny: Tiny) -> None:
    directory = tiny()
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"].append(
        content["added_tokens"][0] | {"id": 320, "content": "<tool>", "special": False}
    )
    path.write_text(json.dumps(content), encoding="utf-8")
    found = tokenizer.keys(directory, {}, 321)
    assert found["tokenizer.ggml.tokens"][320] == "<tool>"
    assert found["tokenizer.ggml.token_type"][320] == USER_DEFINED


def test_an_end_token_that_is_not_special(tiny: Tiny) -> None:
    """Only this key tells readers that a turn ends there."""
    directory = tiny()
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    ends = [
        content["added_tokens"][0] | {"id": 320 + i, "content": f"</{i}>", "special": i == 0} for i in (0, 1)
    ]
    content["added_tokens"] += ends
    path.write_text(json.dumps(content), encoding="utf-8")
    found = tokenizer.keys(directory, {"eos_token_id": [1, 320]}, 322)
    assert "tokenizer.ggml.eot_token_id" not in found
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 320, 321]}))
    found = tokenizer.keys(directory, {}, 322)
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.eot_token_id"]) == (1, 321)
    assert found["tokenizer.ggml.token_type"][321] == CONTROL


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"ignore_merges": True}, "llama-bpe"),
        ({"splits": [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]}, "gpt-2"),
        (
            {
                "splits": [
                    {"type": "Digits", "individual_digits": True},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
                ]
            },
            "smollm",
        ),
        ({"pattern": (r"\p{N}{1,3}", r"\p{N}")}, "qwen2"),
        ({"pattern": (r"\p{N}{1,3}", r"\p{N}"), "lines": "[^\n]+|[\n]+"}, "laguna"),
        ({"pattern": (r"\p{N}{1,3}", r"\p{N}"), "lines": r"[^\n]+|[\n]+"}, "laguna"),
    ],
)
def test_split_rules_decide_the_name(demo: Path, change: dict[str, Any], name: str) -> None:
    content = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    if "ignore_merges" in change:
        content["model"]["ignore_merges"] = True
    if "splits" in change:
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": change["splits"]}
    if "pattern" in change:
        regex = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        regex["Regex"] = regex["Regex"].replace(*change["pattern"])
    if "lines" in change:
        lines = {"type": "Split", "pattern": {"Regex": change["lines"]}, "behavior": "Isolated"}
        content["pre_tokenizer"]["pretokenizers"].insert(0, lines)
    assert pre.identify(content) == name


def test_unknown_split_rules_name_the_option(demo: Path, tmp_path: Path) -> None:
    content = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    changed = copy.deepcopy(content)
    changed["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+|\W+"
    with pytest.raises(ConvertError, match=r"split rules that libllama knows; got \\w\+\|\\W\+ .*--pre NAME"):
        pre.identify(changed)
    directory = tmp_path / "other"
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps(changed), encoding="utf-8")
    assert tokenizer.keys(directory, {}, 8192, pre="gpt-2")["tokenizer.ggml.pre"] == "gpt-2"


def test_sentencepiece_bpe(tiny: Tiny) -> None:
    directory = tiny(vocab_size=430)
    reference = sentencepiece_model(directory, "bpe")
    found = tokenizer.keys(directory, {}, 430)
    assert found["tokenizer.ggml.model"] == "llama"
    types, scores = found["tokenizer.ggml.token_type"], found["tokenizer.ggml.scores"]
    assert types[:3] == [UNKNOWN, CONTROL, CONTROL]
    assert found["tokenizer.ggml.tokens"][3] == "<0x00>"
    assert types[3] == BYTE
    for token in range(420):
        assert found["tokenizer.ggml.tokens"][token] == reference.IdToPiece(token)
        assert scores[token] == pytest.approx(reference.GetScore(token))
    assert types[420:] == [UNUSED] * 10
    assert found["tokenizer.ggml.add_bos_token"]
    assert found["tokenizer.ggml.add_space_prefix"]
    assert found["tokenizer.ggml.bos_token_id"] == reference.bos_id()


def test_sentencepiece_from_tokenizer_json_merges_in_the_same_order(tiny: Tiny) -> None:
    """A checkpoint with only tokenizer.json: scores from merge ranks order pairs as the model's own scores
    do."""
    directory = tiny(vocab_size=420)
    reference = sentencepiece_model(directory, "bpe")
    own = tokenizer.keys(directory, {}, 420)
    pieces = {reference.IdToPiece(i): i for i in range(420)}
    order = sorted(range(259, 420), key=lambda i: -reference.GetScore(i))
    merges = [
        (piece[:cut], piece[cut:])
        for piece in (reference.IdToPiece(i) for i in order)
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    model = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "vocab": pieces, "merges": merges}
    (directory / "tokenizer.model").unlink()
    content = {"model": model, "normalizer": {"type": "Prepend", "prepend": "▁"}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    found = tokenizer.keys(directory, {}, 420)
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.add_space_prefix"]
    assert found["tokenizer.ggml.token_type"] == own["tokenizer.ggml.token_type"]
    merged = [i for i in range(420) if any(reference.IdToPiece(i) == a + b for a, b in merges)]
    assert len(merged) > 50
    by_ours = sorted(merged, key=lambda i: -found["tokenizer.ggml.scores"][i])
    by_theirs = sorted(merged, key=lambda i: -own["tokenizer.ggml.scores"][i])
    assert by_ours == by_theirs


def test_rules_that_libllama_does_not_apply_are_announced(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tiny(vocab_size=420)
    sentencepiece_model(directory, "bpe")
    tokenizer.keys(directory, {}, 420)
    assert "warning" not in capsys.readouterr().err
    path = directory / "tokenizer.model"
    path.write_bytes(
        path.read_bytes() + bytes([0x1A, 4, 0x12, 2, 1, 2])
    )  # normalizer_spec {charsmap: 2 bytes}
    tokenizer.keys(directory, {}, 420)
    assert "warning: [tokenizer.model] expected no normalisation rules" in capsys.readouterr().err


def test_unigram(tiny: Tiny) -> None:
    directory = tiny(vocab_size=420)
    reference = sentencepiece_model(directory, "unigram")
    found = tokenizer.keys(directory, {}, 420)
    assert found["tokenizer.ggml.model"] == "t5"
    assert found["tokenizer.ggml.scores"][10] == pytest.approx(reference.GetScore(10))
    assert found["tokenizer.ggml.precompiled_charsmap"].dtype == np.uint8
    assert found["tokenizer.ggml.precompiled_charsmap"].size > 1000
    assert found["tokenizer.ggml.add_eos_token"]


def test_damaged_sentencepiece_model_is_refused(tiny: Tiny) -> None:
    directory = tiny()
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(b"\xff\x00 not a model")
    with pytest.raises(ConvertError, match=r"\[tokenizer.model\] expected a SentencePiece model"):
        tokenizer.keys(directory, {}, 320)


def test_no_tokenizer_is_refused(tiny: Tiny) -> None:
    directory = tiny()
    (directory / "tokenizer.json").unlink()
    with pytest.raises(
        ConvertError, match=r"expected a BPE or Unigram tokenizer.json, or a tokenizer.model; got neither"
    ):
        tokenizer.keys(directory, {}, 320)


def test_malformed_files_are_refused(tiny: Tiny) -> None:
    directory = tiny()
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["model"]["merges"]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConvertError, match=r"\[tokenizer\] expected files as .*; got KeyError: 'merges'"):
        tokenizer.keys(directory, {}, 320)


def test_named_chat_templates(tiny: Tiny) -> None:
    directory = tiny()
    named = [{"name": "default", "template": "{{ a }}"}, {"name": "tool-use", "template": "{{ b }}"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = tokenizer.keys(directory, {}, 320)
    assert found["tokenizer.chat_template"] == "{{ a }}"
    assert found["tokenizer.chat_templates"] == ["tool_use"]
    assert found["tokenizer.chat_template.tool_use"] == "{{ b }}"


def test_gemma4_merges_whole_lines(tiny: Tiny, tmp_path: Path) -> None:
    core = pytest.importorskip("latentkv._core", reason="the native module is not built")
    from tokenizers import Tokenizer, models, normalizers, trainers

    reference = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    reference.normalizer = normalizers.Replace(" ", "▁")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|channel>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    reference.train_from_iterator(TEXT.split("\n"), trainer)
    directory = tiny("gemma4", vocab_size=600, vocab_size_per_layer_input=600)
    reference.save(str(directory / "tokenizer.json"))
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"] = content["added_tokens"][:5]  # bytes are pieces
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    reference = Tokenizer.from_file(str(directory / "tokenizer.json"))
    out = tmp_path / "out.gguf"
    assert main([str(directory), "-o", str(out), "--method", "none"]) == 0
    found = keys(out)
    assert found["tokenizer.ggml.model"] == "gemma4"
    assert found["tokenizer.ggml.token_type"][4] == USER_DEFINED
    model = core.Model(str(out), vocab_only=True)
    for text in (TEXT, HARD, "two  spaces,\n\nand a tab\t."):
        expected = reference.encode(text, add_special_tokens=False).ids
        assert model.tokenize(text.encode(), add_special=False) == expected


@pytest.mark.parametrize("family", ["demo", "llama-bpe", "bpe", "unigram"])
def test_libllama_gives_the_same_ids(tiny: Tiny, demo: Path, tmp_path: Path, family: str) -> None:
    core = pytest.importorskip("latentkv._core", reason="the native module is not built")
    directory, reference = demo, None
    if family != "demo":
        directory = tiny(vocab_size=420)
    if family in ("bpe", "unigram"):
        reference = sentencepiece_model(directory, family)
    out = tmp_path / "out.gguf"
    assert main([str(directory), "-o", str(out), "--method", "none"]) == 0
    model = core.Model(str(out), vocab_only=True)
    texts = [TEXT, HARD] if family != "unigram" else [TEXT]
    for text in texts:
        if reference is None:
            from tokenizers import Tokenizer

            expected = (
                Tokenizer.from_file(str(directory / "tokenizer.json"))
                .encode(text, add_special_tokens=False)
                .ids
            )
        else:
            expected = reference.encode(text)
        assert model.tokenize(text.encode(), add_special=False) == expected
