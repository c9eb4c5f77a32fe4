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
from both import core
from gguf_files import plain

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


def with_ends(directory: Path, n: int) -> None:
    """Adds tokens 320, 321 … of names that no reader knows, every second of them special."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    first = content["added_tokens"][0]
    content["added_tokens"] += [
        first | {"id": 320 + i, "content": f"</{i}>", "special": i % 2 == 0} for i in range(n)
    ]
    path.write_text(json.dumps(content), encoding="utf-8")


END, TURN, MESSAGE, OTHERS = (
    f"tokenizer.ggml.{name}" for name in ("eos_token_id", "eot_token_id", "eom_token_id", "eog_token_ids")
)


@pytest.mark.parametrize(
    ("generation", "config", "found"),
    [
        ({"eos_token_id": [1, 320]}, {}, {END: 1, TURN: 320}),
        ({"eos_token_id": [321, 1, 320]}, {}, {END: 1, TURN: 321, MESSAGE: 320}),
        (
            {"eos_token_id": [1, 320, 321, 322, 323]},
            {},
            {END: 1, TURN: 320, MESSAGE: 321, OTHERS: [322, 323]},
        ),
        ({"eos_token_id": 320}, {"eos_token_id": [1, 321]}, {END: 1, TURN: 320}),  # transformers' own order
        ({}, {"eos_token_id": [1, 321]}, {END: 1, TURN: 321}),
        ({"eos_token_id": None}, {"eos_token_id": [320, 320]}, {END: 1, TURN: 320}),
        ({"eos_token_id": [1, -1, 999, True]}, {}, {END: 1}),
    ],
    ids=str,
)
def test_every_end_of_an_answer(
    generation: dict[str, Any], config: dict[str, Any], found: dict[str, Any], tiny: Tiny
) -> None:
    """The tokenizer's own is EOS; the others have libllama's keys, and ours beyond these."""
    directory = tiny()
    with_ends(directory, 4)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    keys = tokenizer.keys(directory, config, 324)
    assert {name: keys[name] for name in (END, TURN, MESSAGE, OTHERS) if name in keys} == found
    ends = [found[END], found.get(TURN, 1), found.get(MESSAGE, 1), *found.get(OTHERS, [])]
    assert {keys["tokenizer.ggml.token_type"][token] for token in ends} == {CONTROL}


MAKERS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("generation", "found"),
    [
        ({}, {}),
        ({"temperature": None, "max_length": 20, "pad_token_id": 3}, {}),
        (
            MAKERS | {"do_sample": True},
            {
                "temp": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "min_p": 0.0,
                "penalty_repeat": 1.1,
                "penalty_last_n": -1,
            },
        ),
        ({"repetition_penalty": 1.0, "temperature": 1}, {"penalty_repeat": 1.0, "temp": 1.0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 50}, {"temp": 0.0, "top_k": 50}),
        ({"temperature": 0.0}, {"temp": 0.0}),
    ],
    ids=str,
)
def test_sampling_that_the_makers_recommend(
    generation: dict[str, Any], found: dict[str, Any], tiny: Tiny
) -> None:
    directory = tiny()
    (directory / "generation_config.json").write_text(json.dumps(generation))
    made = tokenizer.keys(directory, {}, 320)
    prefix = "general.sampling."
    assert {n.removeprefix(prefix): v for n, v in made.items() if n.startswith(prefix)} == found


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"top_p": 1.5}, "top_p] expected a number from 0 to 1; got 1.5"),
        ({"temperature": "warm"}, "temperature] expected a finite number of at least 0; got warm"),
        ({"top_k": True}, "top_k] expected 1 … 2147483647, or 0 (off), or -1 (off); got True"),
        ({"repetition_penalty": 0}, "repetition_penalty] expected a finite number of at least 0.001; got 0"),
    ],
    ids=str,
)
def test_sampling_that_nobody_takes(
    generation: dict[str, Any], message: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tiny()
    (directory / "generation_config.json").write_text(json.dumps(generation))
    assert main([str(directory), "-o", str(tmp_path / "out.gguf"), "--method", "none"]) == 2
    assert f"error: [generation_config.json: {message}" in capsys.readouterr().err


def test_the_runtime_stops_at_every_end(tiny: Tiny, tmp_path: Path) -> None:
    directory = tiny(vocab_size=324)
    with_ends(directory, 4)
    ends = [1, 320, 321, 323]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    model = core.Model(str(plain(directory, tmp_path / "plain.gguf")))
    assert [token for token in range(324) if model.is_eog(token)] == ends


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
