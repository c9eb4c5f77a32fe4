"""The verbs of sequences where layers are recurrent: a sequence goes on from its end or from a snapshot,
and a part of it goes nowhere else."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest
from hybrid_files import Hybrid, write
from runtime import distance, model, session

IDS = [int(i) for i in np.random.default_rng(5).integers(0, 256, 400)]
NEXT = [7, 8, 9]
TAIL = 16  # tokens between a prompt's last snapshots


@pytest.fixture(scope="module", params=["qwen35", "granitehybrid", "lfm2"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    pytest.importorskip("torch")
    return write(tmp_path_factory.mktemp("hybrid") / "model.gguf", request.param)


@pytest.fixture(scope="module")
def opened(hybrid: Hybrid) -> Any:
    return model(hybrid.path)


def exact(opened: Any, **options: Any) -> Any:
    return session(opened, kv="f32", **options)


def goes_on(one: Any, hybrid: Hybrid, text: list[int], seq: int = 0) -> bool:
    got = one.decode(NEXT, seq=[seq] * len(NEXT), output="all")
    return distance(got, hybrid.logits([*text, *NEXT])[-len(NEXT) :]) < 1e-4


def test_copies_are_sequences_of_their_own(opened: Any, hybrid: Hybrid) -> None:
    one = exact(opened, n_seq_max=4)
    one.decode(IDS[:50])
    for seq in (1, 2, 3):
        one.seq_cp(0, seq)
    one.decode(IDS[50:60] + IDS[100:110], seq=[0] * 10 + [1] * 10, output="none")
    assert one.seq_rm(0)
    assert goes_on(one, hybrid, IDS[:50] + IDS[100:110], 1)
    assert goes_on(one, hybrid, IDS[:50], 2)
    assert goes_on(one, hybrid, IDS[:50], 3)
    with pytest.raises(ValueError, match=r"^\[seq_cp\] expected an empty sequence as the copy.*sequence 2$"):
        one.seq_cp(1, 2)
    assert goes_on(one, hybrid, IDS[:50] + NEXT, 3)


def test_a_copy_keeps_its_state_while_the_first_goes_on(opened: Any, hybrid: Hybrid) -> None:
    one = exact(opened, n_seq_max=2)
    one.decode(IDS[:50])
    one.seq_cp(0, 1)
    for each in IDS[50:54]:
        one.decode([each])
    assert goes_on(one, hybrid, IDS[:50], 1)
    assert goes_on(one, hybrid, IDS[:54], 0)


def test_sequences_take_turns_in_a_batch(opened: Any, hybrid: Hybrid) -> None:
    one = exact(opened, n_seq_max=2)
    texts = IDS[:20], IDS[100:120]
    one.decode([each for pair in zip(*texts, strict=True) for each in pair], seq=[0, 1] * 20, output="none")
    for seq, text in enumerate(texts):
        assert goes_on(one, hybrid, text, seq)


def test_the_beginning_of_a_sequence_is_copied_from_a_snapshot(opened: Any, hybrid: Hybrid) -> None:
    one = exact(opened, n_seq_max=3)
    one.decode(IDS[:50])
    for each in IDS[50:70]:
        one.decode([each])
    with pytest.raises(
        ValueError, match=r"^\[seq_cp\] expected all tokens of sequence 0, or the first 50, as"
    ):
        one.seq_cp(0, 1, 0, 60)
    assert one.seq_pos_max(1) == -1
    one.seq_cp(0, 1, 0, 50)
    assert goes_on(one, hybrid, IDS[:50], 1)
    one.seq_cp(1, 2, 0, 50 - TAIL)
    assert goes_on(one, hybrid, IDS[: 50 - TAIL], 2)
    assert goes_on(one, hybrid, IDS[:70], 0)


def test_a_sequence_goes_back_to_its_prompt(opened: Any, hybrid: Hybrid) -> None:
    one = exact(opened)
    one.decode(IDS[:80])
    for each in IDS[80:100]:
        one.decode([each])
    assert [one.seq_resumable(0, n) for n in (100, 99, 98, 81, 80, 79, 70, 64, 63)] == [
        *(100, 99, 80, 80, 80, 64, 64, 64, 0)
    ]
    assert not one.seq_rm(0, 90, -1)
    assert one.seq_pos_max(0) == 99
    assert one.seq_rm(0, 99, -1)  # what was there before the last ubatch
    assert goes_on(one, hybrid, IDS[:99])
    for end in (80, 80, 64):
        assert one.seq_rm(0, end, -1)
        assert goes_on(one, hybrid, IDS[:end])
    assert one.seq_rm(0)
    assert goes_on(one, hybrid, [])


def test_long_prompts_have_snapshots_on_the_way(opened: Any, hybrid: Hybrid) -> None:
    one = session(opened, kv="f16", n_ctx=8192, n_ubatch=256)
    text = (IDS * 20)[:7000]
    one.decode(text, output="last")
    ends = sorted({one.seq_resumable(0, n) for n in range(7001)})
    assert ends[0] == 0
    assert ends[-2:] == [7000 - TAIL, 7000]
    assert 3 <= len(ends) <= 6
    got = one.seq_resumable(0, 6000)
    assert got > 1500
    assert one.seq_rm(0, got, -1)
    again = one.decode(text[got : got + 20], output="last")
    alone = session(opened, kv="f16", n_ctx=8192, n_ubatch=256)
    assert distance(again, alone.decode(text[: got + 20], output="last")) < 1e-3


def flags(n: int) -> list[bool]:
    """A token and n guesses."""
    return [False] + [True] * n


@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_guesses_are_taken_back_one_by_one(opened: Any, hybrid: Hybrid, implementation: str) -> None:
    """With room for as many states; nothing is computed twice."""
    for n_right in range(4):
        one = exact(opened, n_guesses=3, implementation=implementation)
        one.decode(IDS[:40])
        guessed = [*IDS[41 : 41 + n_right], *[1, 2, 3][n_right:]]
        one.decode([IDS[40], *guessed], output="all", guessed=flags(3))
        assert [one.seq_resumable(0, end) for end in (43, 42, 41, 40)] == [43, 42, 41, 40]
        assert one.seq_rm(0, 41 + n_right, -1)
        assert goes_on(one, hybrid, IDS[: 41 + n_right])


def test_more_guesses_than_there_is_room_for(opened: Any, hybrid: Hybrid) -> None:
    one = exact(opened, n_guesses=1, n_seq_max=2)
    for seq in (0, 1):
        one.decode(IDS[:40], seq=[seq] * 40)
    one.decode([IDS[40], IDS[41], 1, 2], output="all", guessed=flags(3))
    assert [one.seq_resumable(0, end) for end in (43, 42)] == [43, 40]
    one.decode([IDS[40], 5], seq=[1, 1], output="all", guessed=flags(1))
    assert one.seq_rm(1, 41, -1)
    assert goes_on(one, hybrid, IDS[:41], 1)
    assert one.seq_rm(0, 40, -1)
    assert goes_on(one, hybrid, IDS[:40])


@pytest.mark.parametrize("n_right", [(0, 2), (2, 1), (3, 3)])
def test_sequences_guess_beside_each_other(opened: Any, hybrid: Hybrid, n_right: tuple[int, int]) -> None:
    """Each goes back by its own states; guesses of two sequences of equal length share a ubatch."""
    one = exact(opened, n_guesses=3, n_seq_max=2)
    tokens, seqs = [], []
    for seq, right in enumerate(n_right):
        one.decode(IDS[:40], seq=[seq] * 40)
        tokens += [*IDS[40 : 41 + right], *[1, 2, 3][right:]]
        seqs += [seq] * 4
    one.decode(tokens, seq=seqs, output="all", guessed=flags(3) * 2)
    for seq, right in enumerate(n_right):
        assert one.seq_rm(seq, 41 + right, -1)
        assert goes_on(one, hybrid, IDS[: 41 + right], seq)


def test_guesses_are_taken_back(opened: Any, hybrid: Hybrid) -> None:
    """To what was there before them; a batch without a prompt's end leaves no other snapshot."""
    one = exact(opened)
    one.decode(IDS[:40])
    one.decode([IDS[40], 1, 2, 3, 4], output="all", guessed=flags(4))
    assert one.seq_resumable(0, 43) == 40
    assert not one.seq_rm(0, 41, -1)
    assert one.seq_rm(0, 40, -1)
    one.decode(IDS[40:42], output="last")
    assert goes_on(one, hybrid, IDS[:42])


def test_a_call_that_fails_or_stops_changes_nothing_else(opened: Any, hybrid: Hybrid) -> None:
    one = exact(opened, n_ctx=64, n_ubatch=8)
    one.decode(IDS[:20])
    with pytest.raises(ValueError, match=r"^\[context\]"):
        one.decode(IDS[:60])

    def stop(_: Any) -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError):
        one.decode(IDS[20:40], output=[True] * 20, take=stop)
    assert one.seq_pos_max(0) == 27
    assert goes_on(one, hybrid, IDS[:28])


def test_steps_that_are_left_off_give_their_states_back(opened: Any, hybrid: Hybrid) -> None:
    one = exact(opened)
    one.decode(IDS[:20])
    for _ in range(8):
        is_over = threading.Event()
        thread = threading.Thread(target=interrupts, args=(one, is_over))
        thread.start()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                one.decode(IDS[20:400], output="none")
        finally:
            is_over.set()
            thread.join()
        assert one.seq_rm(0, 20, -1)
    assert goes_on(one, hybrid, IDS[:20])


def interrupts(one: Any, is_over: threading.Event) -> None:
    while not is_over.is_set():
        one.interrupt()


def test_saved_and_loaded(opened: Any, hybrid: Hybrid) -> None:
    one = exact(opened, n_seq_max=2)
    one.decode(IDS[:60])
    one.seq_cp(0, 1)
    one.decode(IDS[60:70], output="none")
    whole, alone = one.state_bytes(), one.seq_state_bytes(0)
    for seq in (0, 1):
        other = exact(opened, n_seq_max=2)
        assert other.set_state(whole) == ""
        assert other.seq_resumable(0, 69) == 60
        assert goes_on(other, hybrid, IDS[: 70 if seq == 0 else 60], seq)
        assert other.set_seq_state(1 - seq, alone) == ""
        assert goes_on(other, hybrid, IDS[:70], 1 - seq)
        assert other.seq_rm(1 - seq, 60, -1)
        assert goes_on(other, hybrid, IDS[:60], 1 - seq)


def test_other_row_formats_take_a_state(opened: Any, hybrid: Hybrid) -> None:
    one = exact(opened)
    one.decode(IDS[:60])
    other = session(opened, kv="f16", sink=4, recent=16)
    assert other.set_state(one.state_bytes(), "any") != ""
    got = other.decode(NEXT, output="all")
    assert distance(got, hybrid.logits([*IDS[:60], *NEXT])[-3:]) < 1e-2


def test_a_sequence_in_parts(opened: Any, hybrid: Hybrid) -> None:
    one = exact(opened, n_seq_max=2)
    one.decode(IDS[:90])
    one.decode(IDS[90:93])
    parts = one.seq_state_parts(0, [0, 32, 80])
    other = exact(opened, n_seq_max=2)
    other.set_seq_state(1, parts)
    assert other.seq_resumable(1, 92) == 90
    assert goes_on(other, hybrid, IDS[:93], 1)
    # without the last part there is no state behind the last token
    with pytest.raises(ValueError, match=r"^\[state\] expected the recurrent state after the last token of"):
        other.set_seq_state(1, parts[:2])
    assert other.seq_pos_max(1) == -1


def test_sequences_that_come_and_go(opened: Any, hybrid: Hybrid) -> None:
    one = exact(opened, n_seq_max=3)
    texts: dict[int, list[int]] = {s: [] for s in range(3)}
    random = np.random.default_rng(0)
    for step in range(60):
        s = int(random.integers(3))
        if random.random() < 0.2:
            assert one.seq_rm(s)
            texts[s] = []
        ids = [int(i) for i in random.integers(0, 256, int(random.choice([1, 2, 40])))]
        if len(texts[s]) + len(ids) > 150:
            assert one.seq_rm(s)
            texts[s] = []
        one.decode(ids, seq=[s] * len(ids))
        texts[s] += ids
        if step % 10 == 9:
            one.seq_keep(s)
            texts = {t: text if t == s else [] for t, text in texts.items()}
        s = int(random.integers(3))
        assert goes_on(one, hybrid, texts[s], s)
        texts[s] += NEXT
    one.clear()
    assert goes_on(one, hybrid, [], 2)
