"""Completions on a scripted model: what is shown, when it ends, what is reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import latentkv
from latentkv import LatentKVError, LlamaGrammar
from latentkv.generate.writer import AnswerWriter, Ends

Build = Callable[..., Any]


def stream_text(chunks: Any) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_shape_and_counts(scripted: Build, script: Any) -> None:
    script.say(5, b"He", b"llo", b"!")
    out = scripted()("Howdy", max_tokens=16)
    assert out["object"] == "text_completion"
    assert out["model"] == "scripted.gguf"
    assert out["id"].startswith("cmpl-")
    assert out["choices"] == [{"text": "Hello!", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert out["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    json.dumps(out)


def test_max_tokens_and_context(scripted: Build, script: Any) -> None:
    script.say(5, *[b"x"] * 50)
    llm = scripted(n_ctx=12)
    assert llm("Howdy", max_tokens=3)["choices"][0] == {
        "text": "xxx", "index": 0, "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    for unlimited in (None, -1, 0):
        choice = llm("Howdy", max_tokens=unlimited)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("x" * 7, "length")


def test_prompt_that_does_not_fit(scripted: Build) -> None:
    with pytest.raises(
        LatentKVError, match=r"\[context\] expected a prompt of at most 7 tokens; got 20; raise -c / n_ctx"
    ):
        scripted(n_ctx=8)("x" * 20)


def test_characters_across_tokens(scripted: Build, script: Any) -> None:
    euro = "€".encode()
    script.say(2, b"5", euro[:1], euro[1:2], euro[2:], b".")
    chunks = list(scripted()("ab", stream=True))
    assert [c["choices"][0]["text"] for c in chunks] == ["5", "€", ".", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_unfinished_character_at_the_end(scripted: Build, script: Any) -> None:
    script.say(2, b"a", "€".encode()[:2])
    assert scripted()("ab")["choices"][0]["text"] == "a\ufffd"


def test_stop_string_across_tokens_never_leaks(scripted: Build, script: Any) -> None:
    script.say(2, b"one", b" E", b"N", b"D", b" two")
    llm = scripted()
    texts = [c["choices"][0]["text"] for c in llm("ab", stop="END", stream=True)]
    assert "".join(texts) == "one "
    assert not any("E" in text for text in texts)
    out = llm("ab", stop=["END", "never"])
    assert out["choices"][0]["text"] == "one "
    assert out["choices"][0]["finish_reason"] == "stop"
    assert llm("ab", stop=["ENX"])["choices"][0]["text"] == "one END two"


def test_stream_adds_up(scripted: Build, script: Any) -> None:
    script.say(2, b"a", b"bc", "ü".encode()[:1], "ü".encode()[1:], b"d")
    llm = scripted()
    chunks = list(llm("xy", stream=True, stop=["zz"], logprobs=1))
    whole = llm("xy", stop=["zz"], logprobs=1)
    assert stream_text(chunks) == whole["choices"][0]["text"] == "abcüd"
    tokens = [t for c in chunks for t in c["choices"][0]["logprobs"]["tokens"]]
    assert tokens == whole["choices"][0]["logprobs"]["tokens"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_logprobs(scripted: Build, script: Any) -> None:
    script.say(2, b"a", b"bc")
    lp = scripted()("xy", logprobs=2)["choices"][0]["logprobs"]
    assert lp["tokens"] == ["a", "bc"]
    assert lp["text_offset"] == [2, 3]
    wanted = 20 - np.log(np.exp(20.0) + 399)  # one logit of 20 among zeros
    assert lp["token_logprobs"] == pytest.approx([wanted] * 2)
    assert next(iter(lp["top_logprobs"][0])) == "a"
    assert len(lp["top_logprobs"][0]) == 2


def test_tokens_behind_a_stop_are_not_reported(scripted: Build, script: Any) -> None:
    script.say(2, b"a", b"b", b"c", b"d")
    lp = scripted()("xy", logprobs=1, stop="cd")["choices"][0]["logprobs"]
    assert lp["tokens"] == ["a", "b"]


def test_echo_with_logprobs_scores_the_prompt(scripted: Build, script: Any) -> None:
    script.say(2, b"c")
    choice = scripted()("ab", echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None


def test_prefix_is_computed_once(scripted: Build, script: Any) -> None:
    script.say(5, b"!")
    llm = scripted()
    llm("Howdy", max_tokens=1)
    assert len(script.decoded) == 5
    script.say(8, b"!")
    llm("Howdy ho", max_tokens=1)
    assert len(script.decoded) == 8
    assert llm.timings.cached_n == 5
    script.say(4, b"!")
    llm("Howl", max_tokens=1)  # shares "How"
    assert script.decoded[-1] == ord("l") + 1
    assert len(script.decoded) == 9
    llm("Howl", max_tokens=1)  # its logits are still at hand
    assert len(script.decoded) == 9
    assert llm.input_ids.tolist() == [ord(c) + 1 for c in "Howl"]


def test_processors_and_criteria(scripted: Build, script: Any) -> None:
    script.say(2, *[b"x"] * 9)
    llm = scripted()

    def shout(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        logits[ord("!") + 1] = 99
        return logits

    assert (
        llm("ab", max_tokens=2, logits_processor=latentkv.LogitsProcessorList([shout]))["choices"][0]["text"]
        == "!!"
    )
    stop_at_five = latentkv.StoppingCriteriaList([lambda ids, logits: len(ids) >= 5])
    choice = llm("ab", stopping_criteria=stop_at_five)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("xxx", "stop")


def test_abandoned_stream_leaves_a_sound_state(scripted: Build, script: Any) -> None:
    script.say(2, b"a", b"b", b"c")
    llm = scripted()
    stream = llm("xy", stream=True)
    next(stream)
    stream.close()
    assert llm("xy")["choices"][0]["text"] == "abc"


def test_interrupted_decode_keeps_what_is_cached(scripted: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted()
    decode = llm.session.decode

    def cut(tokens: list[int], **options: Any) -> Any:
        decode(tokens[:3], output="none")
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.session, "decode", cut)
    with pytest.raises(KeyboardInterrupt):
        llm.eval(list(range(1, 9)))
    assert llm.n_tokens == 3
    assert not llm.has_logits


def test_chat_shapes(scripted: Build, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    llm = scripted()
    messages = [{"role": "user", "content": "Hi"}]
    prompt = llm.chat_template.render(messages)
    assert "no chat template; using ChatML" in capsys.readouterr().err
    script.say(len(prompt), b"Yes", b".")
    out = llm.create_chat_completion(messages, top_logprobs=1, logprobs=True)
    choice = out["choices"][0]
    assert out["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "Yes."}
    assert choice["finish_reason"] == "stop"
    assert [t["bytes"] for t in choice["logprobs"]["content"]] == [list(b"Yes"), list(b".")]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"] == "Yes"
    chunks = list(llm.create_chat_completion(messages, stream=True))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert [c["choices"][0]["delta"].get("content", "") for c in chunks] == ["", "Yes", ".", ""]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm("a", suffix="b"),
            r"\[suffix\] expected a vocabulary with tokens to fill in the middle",
        ),
        (lambda llm: llm("a", tfs_z=0.5), r"\[tfs_z\] expected 1.0"),
        (lambda llm: llm("a", top_p=2), r"\[top_p\] expected a probability"),
        (lambda llm: llm("a", seed=-2), r"\[seed\] expected 0 … 4294967295, or -1"),
        (lambda llm: llm("a", logit_bias={"x": 1}), r"\[logit_bias\] expected a map"),
        (lambda llm: llm([1, 999]), r"\[prompt\] expected token ids below 400; got 999"),
        (lambda llm: llm.embed(["a", 1]), r"\[embed\] expected a text, or a list of them; got int"),
        (lambda llm: llm.tokenize("text"), r"\[tokenize\] expected bytes; got str"),
        (lambda llm: llm.create_chat_completion([]), r"\[messages\] expected at least one message"),
        (lambda llm: llm.create_chat_completion(["hi"]), r"\[messages\] expected dicts"),
        (
            lambda llm: llm.create_chat_completion([{"role": "user", "content": "x"}], tools=[{}]),
            r"\[tools\]",
        ),
        (
            lambda llm: llm.create_chat_completion(
                [{"role": "user", "content": "x"}], response_format={"type": "xml"}
            ),
            r"\[response_format\]",
        ),
        (lambda llm: llm.scores, r"\[scores\] expected Llama\(…, logits_all=True\)"),
        (lambda llm: next(llm.generate([])), r"\[prompt\] expected at least one token"),
        (lambda llm: (llm.close(), llm("a")), r"\[Llama\] expected an open model"),
    ],
)
def test_refusals(scripted: Build, call: Callable[[Any], Any], message: str) -> None:
    llm = scripted(chat_format="chatml")
    with pytest.raises(LatentKVError, match=message):
        call(llm)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lora_path": "x"}, LatentKVError, r"\[lora_path\] expected None; got 'x'; merge the adapter"),
        ({"offload_kqv": False}, LatentKVError, r"\[offload_kqv\] expected True; got False"),
        ({"split_mode": 2}, LatentKVError, r"\[split_mode\] expected 0 \(none\) or 1 \(layer\), .*; got 2"),
        ({"tensor_split": [1, -1]}, LatentKVError, r"\[tensor_split\] expected a finite number"),
        ({"no_such": 1}, TypeError, "unexpected keyword argument 'no_such'"),
        ({"type_k": 99}, LatentKVError, r"\[type_k\] expected a format name or one of the ggml types"),
        (
            {"type_k": 8, "kv_k": "q4"},
            LatentKVError,
            r"\[kv_k\] expected the same as type_k; got q4 and q8_0",
        ),
        ({"n_ctx": -1}, LatentKVError, r"\[n_ctx\]"),
    ],
)
def test_constructor_refusals(
    scripted: Build, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        scripted(**options)


def test_llama_cpp_python_arguments_at_neutral_values(scripted: Build) -> None:
    with scripted(
        flash_attn=True,
        offload_kqv=True,
        split_mode=1,
        use_mlock=False,
        rope_freq_base=0.0,
        type_k=1,
        type_v="q8_0",
    ) as llm:
        assert llm.n_ctx() == 512
    llm.close()


def test_grammar_file(tmp_path: Any) -> None:
    path = tmp_path / "g.gbnf"
    path.write_text('root ::= "yes"', encoding="utf-8")
    assert LlamaGrammar.from_file(path).text == 'root ::= "yes"'


@pytest.mark.parametrize(
    ("ends", "limit", "text", "reason"),
    [
        (Ends(["ab"]), 9, "x", "stop"),
        (Ends(["abc"]), 2, "xab", "length"),  # what was held back is shown
        (Ends(cut=lambda text: 0 if text == "b" else None), 2, "xa", "length"),
        (Ends(asked=lambda token: token == 1), 2, "xab", "stop"),  # before the limit
        (Ends(ignores_end=True), 3, "xab!", "length"),
        (Ends(), 9, "xab", "stop"),
    ],
)
def test_an_answer_ends_by_one_rule(ends: Ends, limit: int, text: str, reason: str) -> None:
    writer = AnswerWriter(ends, limit, limit, None, None, {})
    drawn = [(0, b"xa", False), (1, b"b", False), (2, b"!", True)]
    pieces = []
    for each in drawn:
        pieces.append(writer.step(each, None))
        if pieces[-1].finish_reason is not None:
            break
    assert ("".join(piece.text for piece in pieces), pieces[-1].finish_reason) == (text, reason)
    assert writer.end == (2 if len(pieces) == 3 and not ends.ignores_end else None)
    assert writer.left == limit - len(writer.tokens)
