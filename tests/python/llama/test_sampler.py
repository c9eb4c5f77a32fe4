"""The native sampler on rows of logits: what each option keeps, grammars that wait, copies."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

WORDS = 'root ::= "<tool_call>" ("yes" | "no") "!"'


@pytest.fixture(scope="module")
def model(plain_gguf: Path) -> Any:
    from latentkv import _core

    return _core.Model(str(plain_gguf), vocab_only=True)


def sampler(model: Any, grammar: str | None = None, **options: Any) -> Any:
    """Options that begin with grammar_ are LlamaGrammar's."""
    from latentkv import LlamaGrammar, _core

    of_grammar = {key[8:]: options.pop(key) for key in list(options) if key.startswith("grammar_")}
    matcher = LlamaGrammar(grammar, **of_grammar).matcher(model) if grammar is not None else None
    return _core.Sampler(model, matcher=matcher, **({"seed": 1} | options))


def row(model: Any, *likely: tuple[int, float]) -> np.ndarray:
    """Zeros but for (token, logit)."""
    logits = np.zeros(model.n_vocab, np.float32)
    for token, logit in likely:
        logits[token] = logit
    return logits


def rows(model: Any, count: int) -> np.ndarray:
    return np.random.default_rng(3).normal(0, 3, (count, model.n_vocab)).astype(np.float32)


def token(model: Any, text: bytes) -> int:
    return int(model.tokenize(text, False, True)[0])


def drawn(sampler: Any, logits: np.ndarray, count: int = 400) -> Counter[int]:
    return Counter(sampler.sample(logits) for _ in range(count))


def write(model: Any, sampler: Any, logits: np.ndarray) -> bytes:
    """What comes of the rows, until the end token."""
    text = b""
    for line in logits:
        chosen = sampler.sample(line)
        sampler.accept(chosen)
        if model.is_eog(chosen):
            break
        text += model.token_to_piece(chosen, True)
    return text


OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}


def test_top_n_sigma_keeps_what_is_near_the_largest(model: Any) -> None:
    logits = row(model, (5, 20.0), (6, 19.9), (7, 10.0))
    assert set(drawn(sampler(model, **OPEN, top_n_sigma=1.0), logits)) == {5, 6}
    flat = rows(model, 1)[0] * 0.1
    assert len(drawn(sampler(model, **OPEN), flat)) > 100


def test_xtc_removes_the_likeliest(model: Any) -> None:
    logits = row(model, (5, 22.0), (6, 21.5), (7, 21.0))
    assert set(drawn(sampler(model, **OPEN, xtc_probability=1.0, xtc_threshold=0.1), logits)) == {7}
    assert set(drawn(sampler(model, **OPEN), logits)) == {5, 6, 7}


def test_dynatemp_flattens_what_is_uncertain(model: Any) -> None:
    logits = row(model, (5, 30.0), (6, 29.0))
    plain = drawn(sampler(model, **(OPEN | {"temperature": 0.3})), logits)
    moved = drawn(sampler(model, **(OPEN | {"temperature": 0.3}), dynatemp_range=5.0), logits)
    assert moved[6] != plain[6]


def test_dry_penalises_what_repeats(model: Any) -> None:
    a, b, c, d = (token(model, text) for text in (b" one", b" two", b" cat", b" dog"))
    logits = row(model, (c, 10.0), (d, 9.0))
    for penalty, wanted in ((0.0, c), (5.0, d)):
        chain = sampler(
            model, temperature=0, dry_multiplier=penalty, dry_penalty_last_n=64, dry_sequence_breakers=[]
        )
        for past in (a, b, c, a, b):
            chain.accept(past)
        assert chain.sample(logits) == wanted


def test_dry_sees_a_prompt_that_no_other_penalty_looks_at(plain_gguf: Path) -> None:
    from latentkv import Llama

    with Llama(str(plain_gguf), n_ctx=64, n_threads=1) as llm:
        a, b, c = (token(llm.model, text) for text in (b" one", b" two", b" cat"))
        options: dict[str, Any] = {
            "max_tokens": 1,
            "temperature": 0,
            "logit_bias": {c: 100.0},
            "repeat_last_n": 0,
        }
        repeated, first = llm.detokenize([c]).decode(), []
        for penalty in (0.0, 1000.0):
            out = llm([a, b, c, a, b], **options, dry_multiplier=penalty, dry_sequence_breakers=[])
            first.append(out["choices"][0]["text"])
    assert first[0] == repeated != first[1]


def test_a_grammar_allows_what_masking_first_allows(model: Any) -> None:
    from latentkv import _core

    grammar = 'root ::= [a-f]+ "."'
    for logits in rows(model, 20):
        greedy = sampler(model, temperature=0, grammar=grammar)
        allowed = [
            i
            for i in np.argsort(-logits)[:500]
            if (piece := model.token_to_piece(int(i))) and set(piece) <= set(b"abcdef")
        ]
        if allowed:
            assert greedy.sample(logits) == allowed[0]
    text = write(model, sampler(model, grammar=grammar, temperature=1.5), rows(model, 40))
    assert set(text) <= set(b"abcdef.")
    mirostat = sampler(model, grammar=grammar, mirostat_mode=2)
    assert set(write(model, mirostat, rows(model, 10))) <= set(b"abcdef.")
    with pytest.raises(_core.Error, match=r"\[sampler\] expected a token that the grammar allows"):
        sampler(model, grammar=grammar).accept(token(model, b"Z"))


@pytest.mark.parametrize(
    ("trigger", "lead"),
    [
        ({"type": "word", "value": "<tool_call>"}, b"so <tool_call>"),
        ({"type": "word", "value": "<|im_start|>"}, b"so <|im_start|>"),
        ({"type": "pattern", "value": r"so\s+(<tool_call>)"}, b"so <tool_call>"),
        ({"type": "pattern_full", "value": r"so (<tool_call>)"}, b"so <tool_call>"),
    ],
)
def test_a_lazy_grammar_waits_for_its_trigger(model: Any, trigger: dict[str, str], lead: bytes) -> None:
    grammar = WORDS.replace("<tool_call>", "<|im_start|>") if b"im_start" in lead else WORDS
    chain = sampler(model, grammar=grammar, grammar_lazy=True, grammar_triggers=[trigger], temperature=1.0)
    free = write(model, chain, rows(model, 12))
    assert b"yes!" not in free  # twelve tokens of anything
    chain.reset()
    for piece in model.tokenize(lead, False, True):
        assert chain.sample(row(model, (piece, 50.0))) == piece
        chain.accept(piece)
    assert write(model, chain, rows(model, 12)) in (b"yes!", b"no!")


def test_a_trigger_can_be_a_token(model: Any) -> None:
    start = token(model, b"<|im_start|>")
    chain = sampler(
        model,
        grammar='root ::= "<|im_start|>" "yes"',
        grammar_lazy=True,
        grammar_triggers=[{"type": "token", "value": "", "token": start}],
    )
    chain.accept(start)
    assert write(model, chain, rows(model, 5)) == b"yes"


def test_a_grammar_reads_the_end_of_the_prompt(model: Any) -> None:
    chain = sampler(
        model, grammar='root ::= "<|im_start|>assistant\\n" "yes"', grammar_prefix="<|im_start|>assistant\n"
    )
    for _ in range(2):
        assert write(model, chain, rows(model, 5)) == b"yes"
        chain.reset()


def test_a_clone_goes_on_alone(model: Any) -> None:
    options = {"temperature": 1.0, "repeat_penalty": 1.3, "grammar": 'root ::= [a-z ]+ "."', "top_k": 0}
    first = sampler(model, **options)
    write(model, first, rows(model, 3))
    second = first.clone()
    third = first.clone()
    ahead = rows(model, 30)[5:]
    assert write(model, second, ahead) == write(model, first, ahead)
    third.reset()
    first.reset()
    assert (
        write(model, third, ahead)
        == write(model, first, ahead)
        == write(model, sampler(model, **options), ahead)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xtc_probability": 2.0}, "xtc_probability from 0 to 1; got 2"),
        ({"dry_penalty_last_n": -5}, "dry_penalty_last_n from 0"),
        ({"dry_allowed_length": -1}, "dry_allowed_length of at least 0; got -1"),
        ({"dynatemp_range": float("nan")}, "dynatemp_range"),
    ],
)
def test_refusals(model: Any, options: dict[str, Any], message: str) -> None:
    from latentkv import _core

    with pytest.raises(_core.Error, match=rf"^\[sampler\] expected .*{message}"):
        sampler(model, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'top_kk'"):
        sampler(model, top_kk=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lazy": True}, "at least one trigger for a lazy grammar; got none"),
        ({"lazy": True, "triggers": [{"type": "pattern", "value": "("}]}, "regular expressions in triggers"),
        ({"lazy": True, "triggers": [{"type": "x", "value": "("}]}, "triggers of the types word, pattern"),
        ({"prefix": "other"}, "one that texts can match"),
        ({"root": "top"}, "a GBNF grammar with the rule 'top'; got the rules root"),
    ],
)
def test_grammars_that_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    from latentkv import LatentKVError, LlamaGrammar

    with pytest.raises(LatentKVError, match=rf"^\[grammar\] expected .*{message}"):
        LlamaGrammar(WORDS, **options).matcher(model)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0}, {"top_k": 1}, {"top_k": 700}, {"typical_p": 0.7}, {"top_n_sigma": 1.0}],
    ids=str,
)
def test_the_largest_logits_alone_draw_the_same(model: Any, options: dict[str, Any]) -> None:
    """A bias of nothing makes the chain look at all logits."""
    few, all_of_them = sampler(model, **options), sampler(model, **options, logit_bias={0: 0.0})
    logits = rows(model, 40)
    logits[3, 800:] = -np.inf
    logits[4] = np.round(logits[4])  # many are equal
    logits[5, ::3] = -np.inf
    for at, line in enumerate(logits):
        if at != 4 or options.get("temperature") == 0:
            assert few.sample(line) == all_of_them.sample(line)
        else:  # of equal ones at the edge of top-k either may be kept
            assert line[few.sample(line)] > np.sort(line)[-701]
            all_of_them.sample(line)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 37, -1])
@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 0}], ids=str)
def test_logits_that_are_none(model: Any, bad: float, at: int, options: dict[str, Any]) -> None:
    logits = rows(model, 1)[0]
    logits[at] = bad
    where = at % model.n_vocab
    with pytest.raises(
        ValueError, match=rf"^\[sampler\] expected logits below \+inf; got .* for token {where}$"
    ):
        sampler(model, **options).sample(logits)
    with pytest.raises(ValueError, match=r"^\[sampler\] expected at least one possible token"):
        sampler(model, **options).sample(np.full_like(logits, -np.inf))


def test_many_are_drawn_as_one_by_one(model: Any) -> None:
    from latentkv import _core

    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"repeat_penalty": 1.3},
        {"grammar": 'root ::= "a"+'},
    ]
    together, alone = ([sampler(model, **kind) for kind in kinds] for _ in range(2))
    order = [3, 0, 2, 1]
    for _ in range(4):
        logits = rows(model, 4)
        for line, one, (token, piece, is_end) in zip(
            (logits[at] for at in order), alone, _core.next_tokens(together, logits, order), strict=True
        ):
            assert token == one.sample(line)
            one.accept(token)
            assert (piece, is_end) == (model.token_to_piece(token), model.is_eog(token))
    logits[order[1]] = np.nan
    drawn = _core.next_tokens(together, logits, order)
    assert drawn[1].startswith("[sampler] expected logits below +inf; got nan")
    assert [isinstance(each, str) for each in drawn] == [False, True, False, False]
    with pytest.raises(ValueError, match="expected rows below 4; got 4"):
        _core.next_tokens(together[:1], logits, [4])
