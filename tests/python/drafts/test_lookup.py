"""latentkv.drafts: what is guessed, how many of them, and when it stops."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from latentkv.drafts.adaptive import AdaptiveLookup
from latentkv.drafts.lookup import Lookup
from latentkv.drafts.past import MOST, TOKENS, Past
from latentkv.drafts.text import Text
from latentkv.drafts.worth import COUNTS, CPU, GPU, Acceptance, Step


def found(text: Text, tail: Sequence[int]) -> list[int]:
    return list(text.ends_of(tail))


def test_a_passage_is_found_at_its_last_place() -> None:
    text = Text([1, 2, 3, 4, 1, 2, 3, 5, 6])
    assert found(text, [9, 1, 2, 3]) == [7]
    assert found(text, [3, 5, 6]) == []  # nothing follows it yet
    text.append(7)
    assert found(text, [3, 5, 6]) == [9]
    assert found(text, [2, 3]) == []
    assert text.matched([4, 1, 2, 3], 7) == 4
    assert text.matched([8, 1, 2, 3], 7) == 3


def test_texts_that_grow_find_what_whole_ones_do() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(4) for _ in range(400)]
    grown = Text(tokens[:30])
    for token in tokens[30:]:
        grown.append(token)
    whole = Text(tokens)
    for at in range(8, 400):
        tail = tokens[at - 8 : at]
        assert found(grown, tail) == found(whole, tail)
    assert all(whole.tokens[end - 3 : end] == [1, 2, 3] for end in found(whole, [1, 2, 3]))


@pytest.mark.parametrize("largest", [151_000, 2**31 - 1])
def test_tokens_of_any_size(largest: int) -> None:
    tokens = [largest - at for at in range(20)] * 2
    assert found(Text(tokens), tokens[:12]) == [32, 32]


def test_a_source_is_followed_while_it_goes_on() -> None:
    source = list(range(100, 160))
    lookup = Lookup([*source, 1, 2, *source[:4]])
    wrote = []
    for _ in range(3):
        guessed = lookup.guesses(Step(1, GPU), 15)
        assert guessed == source[4 + len(wrote) : 4 + len(wrote) + len(guessed)]
        for token in [*guessed, source[4 + len(wrote) + len(guessed)]]:
            lookup.push(token)
            wrote.append(token)
    assert wrote == source[4 : 4 + len(wrote)]
    assert len(wrote) > 30


def test_others_are_looked_through_where_the_text_says_nothing() -> None:
    lookup = Lookup([7, *range(8)], [Text([9, 9, 9]), Text(range(20))])
    assert lookup.guesses(Step(1, GPU), 3) == [8, 9, 10]


def test_guesses_that_fail_end() -> None:
    """A text that begins like earlier ones and goes on otherwise each time."""
    rng = random.Random(1)
    lookup, drafted = Lookup([1, 2, 3, 4] * 8), 0
    for _ in range(300):
        for token in (1, 2, 3, rng.randrange(100, 10**9)):
            drafted += len(lookup.guesses(Step(1, GPU), 15))
            lookup.push(token)
    late = 0
    for _ in range(100):
        for token in (1, 2, 3, rng.randrange(100, 10**9)):
            late += len(lookup.guesses(Step(1, GPU), 15))
            lookup.push(token)
    assert 0 < drafted < 80
    assert late == 0


def test_a_source_is_rated_without_being_drafted_from() -> None:
    """On a CPU short matches pay only where they were right before."""
    rng = random.Random(2)
    lookup, drafted = Lookup([1, 2, 3, 4] * 2), []
    for _ in range(40):
        for token in (rng.randrange(100, 10_000), 1, 2, 3, 4, 5):
            drafted.append(len(lookup.guesses(Step(1, CPU), 15)))
            lookup.push(token)
    assert sum(drafted[:12]) == 0 < sum(drafted[-60:])


def test_longer_matches_are_worth_more_guesses() -> None:
    acceptance = Acceptance()
    counts = [Step(1, CPU).count(acceptance.rate(length), 15) for length in (3, 8, 16, 32)]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 15
    assert Step(1, CPU).count(0.99, 6) == 3
    assert all(count in (0, *COUNTS) for count in counts)


def test_a_step_of_many_answers_takes_fewer_guesses() -> None:
    counts = []
    for n_answers in (1, 8, 32, 128):
        step = Step(n_answers, CPU)
        counts.append(sum(step.count(0.97, 15) for _ in range(n_answers)) / n_answers)
    assert counts == sorted(counts, reverse=True)


def test_earlier_answers_are_of_one_salt_and_few() -> None:
    past = Past()
    past.add("a", range(20))
    past.add("b", range(20, 40))
    past.add("a", [1, 2])  # too short to be of use
    assert [text.tokens[0] for text in past.of("a")] == [0]
    assert past.of("") == []
    for at in range(2 * MOST):
        past.add("c", range(at, at + 20))
    assert len(past.of("c")) == MOST
    assert past.of("a") == []
    past.add("c", range(TOKENS - 5))
    assert len(past.of("c")) == 1


def test_a_draft_model_that_follows_what_it_is_told() -> None:
    draft = AdaptiveLookup(7, on_gpu=True)
    ids = np.asarray([*range(50), *range(12)], np.intc)
    assert draft(ids).tolist() == list(range(12, 19))
    assert draft(np.append(ids, np.arange(12, 20)).astype(np.intc)).tolist() == list(range(20, 27))
    assert draft(np.asarray([5, 6], np.intc)).size == 0  # another text
