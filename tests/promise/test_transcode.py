"""A state goes on in sessions of other row formats, budgets and exact windows: its rows are coded anew, and
what they lose is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime import WATERFILL, distance, model, session, tokens

N = 196  # 4 sinks, 32 recent tokens and five blocks
EXACT = 1e-5
BATCH = 32  # tokens leave the recent window in batches
# The file's windows, none, smaller and larger ones.
WINDOWS: dict[str, dict[str, Any]] = {
    "none": {"sink": 0, "recent": 0},
    "small": {"sink": 2, "recent": 16, "fixed_window": True},
    "wide": {"sink": 4, "recent": 128, "fixed_window": True},
}


@pytest.fixture(scope="module")
def latent(converted: Any) -> Any:
    """Latents of full rows, which are at hand in exact windows: after a lazy prompt all values are exact."""
    return model(converted(*WATERFILL, "--kv-budget", "40%", "--sink", "4", "--recent", "64", "--master"))


@pytest.fixture(scope="module")
def plain(converted: Any) -> Any:
    return model(converted("--method", "none", "--outtype", "f32"))


def lazy(m: Any, **options: Any) -> Any:
    """A session that has read the prompt, of which every row was coded from the exact one."""
    made = session(m, prefill="lazy", **options)
    made.decode(tokens(m, N), output="none")
    return made


def into(state: bytes, m: Any, **options: Any) -> tuple[Any, str]:
    made = session(m, prefill="lazy", **options)
    return made, made.set_state(state, accept="any")


def next_logits(s: Any) -> Any:
    return np.concatenate([s.decode([t]) for t in (9, 30, 12)])


def places(s: Any) -> dict[str, int]:
    return {region["name"]: region["used"] for region in s.kv_bytes()["regions"]}


F32 = {"kv": "f32", "kv_sink": "f32", "kv_recent": "f32"}
FORMATS: list[dict[str, Any]] = [
    {"kv": "f16"},
    {"kv": "q8_0"},
    {"kv": "q4_0"},
    {"kv": "q4"},
    {"kv_k": "q3", "kv_v": "q6"},
    {"kv": "n4"},
    {"kv_k": "c4", "kv_v": "q4", "sink": 4, "recent": 32, "fixed_window": True},
]


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_exact_full_rows_become_those_that_the_session_would_have_written(
    plain: Any, options: dict[str, Any]
) -> None:
    """Down, from f32 rows to any format: rotated ones too."""
    windows = {name: options[name] for name in ("sink", "recent", "fixed_window") if name in options}
    state = lazy(plain, **F32, **windows).state_bytes()
    restored, lost = into(state, plain, **options)
    own = lazy(plain, **options)
    exact, want = next_logits(lazy(plain, kv="f32")), next_logits(own)
    assert "of 32.0 bits a channel restored as " in lost
    got = next_logits(restored)
    assert distance(got, want) < 0.05 * distance(want, exact) + EXACT
    assert distance(want, exact) > 1e-4  # the formats differ from f32, or nothing was compared


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_up_nothing_is_lost_again(plain: Any, options: dict[str, Any]) -> None:
    """What comes next is in f32 in both sessions; the rows before are the same numbers in other formats."""
    windows: dict[str, Any] = {
        "sink": 4,
        "recent": 32,
        "kv_sink": "f32",
        "kv_recent": "f32",
        "fixed_window": True,
    }
    source = lazy(plain, **(options | windows))
    state, want = source.state_bytes(), next_logits(source)
    restored, lost = into(state, plain, kv="f32", **windows)
    assert "what they had lost stays lost" in lost
    # queries meet codes as integers, those of 4 bits and fewer as bytes, and f32 rows in full
    is_coded = options.get("kv", options.get("kv_k")) in ("q4", "q3", "n4")
    rounded = 0.1 * distance(next_logits(lazy(plain, kv="f32")), want) if is_coded else 0
    assert distance(next_logits(restored), want) < 2 * EXACT + rounded


@pytest.mark.parametrize("origin", WINDOWS)
def test_a_window_less_is_a_demotion(latent: Any, origin: str) -> None:
    """Exact rows become the latents that the session would have written itself."""
    source = lazy(latent, **F32, **WINDOWS[origin])
    exact = N - places(source)["middle"]
    restored, lost = into(source.state_bytes(), latent, **F32, **WINDOWS["none"])
    assert lost == (f"{exact} exact tokens are compressed now" if exact else "")
    assert places(restored) == {"middle": N}
    want = next_logits(lazy(latent, **F32, **WINDOWS["none"]))
    assert distance(next_logits(restored), want) < EXACT


@pytest.mark.parametrize("to", ["small", "wide"])
def test_in_a_window_more_latents_stay_latents(latent: Any, to: str) -> None:
    source = lazy(latent, **F32, **WINDOWS["none"])
    restored, lost = into(source.state_bytes(), latent, **F32, **WINDOWS[to])
    n = WINDOWS[to]["sink"] + WINDOWS[to]["recent"]
    assert lost == f"{n} tokens of the exact windows were compressed before, and stay so"
    assert places(restored) == {"sink": 0, "recent": 0, "middle": N}
    # the first token's own row is exact in one of them, and a latent in the other
    assert distance(next_logits(restored), next_logits(source)) < 2e-2
    restored.decode(tokens(latent, 40), output="none")
    assert places(restored)["recent"] > 0


def test_windows_of_another_size_and_format(latent: Any) -> None:
    """The latest tokens stay exact, as many as a session keeps before it demotes a batch."""
    q8 = {"kv": "f32", "kv_sink": "q8_0", "kv_recent": "q8_0"}
    source = lazy(latent, **F32, **WINDOWS["wide"])
    restored, lost = into(source.state_bytes(), latent, **q8, **WINDOWS["small"])
    assert places(restored) == {"sink": 2, "recent": 16 + 31, "middle": N - 2 - 16 - 31}
    n = places(restored)["middle"] - places(source)["middle"]
    assert "exact rows of 32.0 bits a channel restored as 8.5" in lost
    assert f"{n} exact tokens are compressed now" in lost
    own = lazy(latent, **q8, **WINDOWS["small"])
    assert distance(next_logits(restored), next_logits(own)) < 2e-2
    same, lost = into(source.state_bytes(), latent, **F32, **WINDOWS["small"])
    assert lost == ""  # what is exact leaves with the next batch
    assert places(same) == places(source)
    same.decode([9], output="none")
    assert places(same)["recent"] < 16 + BATCH


def budget(m: Any, share: str) -> dict[str, Any]:
    from latentkv.plan.master import planned

    return dict(planned(m, {"kv_budget": share}))


def test_budgets_of_a_master_file(latent: Any) -> None:
    """A smaller one drops channels; in a larger one they read as zeros."""
    fixed = {"fixed_window": True}
    small, large = budget(latent, "20%") | fixed, budget(latent, "60%") | fixed
    states = {name: lazy(latent, **of).state_bytes() for name, of in (("small", small), ("large", large))}
    down, lost = into(states["large"], latent, **small)
    assert lost.startswith("rows of ")
    exact = next_logits(lazy(latent, **F32, **WINDOWS["none"]))
    own = distance(next_logits(lazy(latent, **small)), exact)
    assert distance(next_logits(down), exact) < 1.2 * own
    up, lost = into(states["small"], latent, **large)
    assert "what they had lost stays lost" in lost
    want = next_logits(lazy(latent, **small))
    assert distance(next_logits(up), want) < 0.25 * distance(want, exact)


@pytest.mark.parametrize("to", [{"kv": "q8"}, {"kv": "q8", "sink": 4, "recent": 32}], ids=str)
def test_several_sequences_and_what_they_share(plain: Any, to: dict[str, Any]) -> None:
    ids = tokens(plain, 140)
    s = session(plain, kv="f32", n_seq_max=3)
    s.decode(ids[:100], seq=[0] * 100, output="none")
    s.seq_cp(0, 2, 0, 60)
    s.decode(ids[100:130], seq=[2] * 30, pos=list(range(60, 90)), output="none")
    other = session(plain, n_seq_max=3, **to)
    assert other.set_state(s.state_bytes(), accept="any")
    assert [other.seq_pos_max(seq) for seq in range(3)] == [99, -1, 89]
    assert other.n_cells_used() == s.n_cells_used() == 130  # shared again
    step = {"tokens": [7, 8], "seq": [0, 2], "output": "all"}
    assert distance(other.decode(**step), s.decode(**step)) < 2e-2
    alone = session(plain, n_seq_max=3, **to)
    alone.decode(ids[:20], seq=[0] * 20, output="none")
    before = alone.seq_state_bytes(0)
    assert alone.set_seq_state(1, s.seq_state_bytes(2), accept="any")
    assert alone.seq_state_bytes(0) == before
    assert distance(alone.decode([5], seq=[1]), s.decode([5], seq=[2])) < 2e-2


def test_blocks_with_holes_and_back(plain: Any) -> None:
    blocks = {"kv_k": "c8", "kv_v": "q8", "sink": 4, "recent": 32}
    s = session(plain, **blocks)
    s.decode(tokens(plain, N), output="none")
    s.seq_rm(0, 50, 60)
    state = s.state_bytes()
    single, lost = into(state, plain, kv="f32", sink=4, recent=32)
    assert "rows of " in lost
    assert sum(places(single).values()) == N - 10
    again, _ = into(single.state_bytes(), plain, **blocks)
    want = next_logits(s)
    assert distance(next_logits(single), want) < 1e-3
    assert distance(next_logits(again), want) < 2e-2


def test_one_way_or_two_the_same_bytes(plain: Any) -> None:
    """f32 in between adds nothing: what a row is decoded to is what is coded."""
    state = lazy(plain, kv="q8").state_bytes()
    direct, _ = into(state, plain, kv="q4")
    between, _ = into(state, plain, kv="f32")
    twice, _ = into(between.state_bytes(), plain, kv="q4")
    assert direct.state_bytes() == twice.state_bytes()
    own, lost = into(state, plain, kv="q8")
    assert lost == ""
    assert own.state_bytes() == state


def test_what_cannot_be_is_refused_and_leaves_nothing(plain: Any, latent: Any, capfd: Any) -> None:
    state = lazy(plain, kv="q8").state_bytes()
    for options, said in (
        (
            {"kv": "q4", "n_ctx": 128},
            r"^\[state\] expected room for 196 tokens among the compressed ones; raise -c",
        ),
        (
            {"kv": "q4", "evict": "h2o", "keep_tokens": "128", "prefill": "eager"},
            r"^\[state\] expected --evict ",
        ),
    ):
        other = session(plain, **options)
        with pytest.raises(ValueError, match=said):
            other.set_state(state, accept="any")
        assert other.n_cells_used() == 0
    with pytest.raises(ValueError, match=r"^\[state\] expected a state of .*; got one of another model"):
        session(latent).set_state(state, accept="any")
    with pytest.raises(ValueError, match=r"^\[accept\] expected same, finer or any; got 'all'"):
        session(plain).set_state(state, accept="all")
    capfd.readouterr()
    session(plain, kv="q4").set_state(state, accept="any")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "warning: [state] expected the rows of this session; got others, coded anew: rows of "
    )
    for cut in (40, 90, len(state) // 2, len(state) - 1):
        broken = session(plain, kv="q4")
        with pytest.raises(ValueError, match=r"^\[state\] expected"):
            broken.set_state(state[:cut], accept="any")
        assert broken.n_cells_used() == 0


def test_damage_is_refused_or_harmless(plain: Any) -> None:
    """One byte of the head, wherever: an error of one line, or a cache that decodes."""
    state = lazy(plain, kv="q8", sink=4, recent=32).state_bytes()
    random = np.random.default_rng(3)
    for at in random.integers(8, 400, 60):
        bad = bytearray(state)
        bad[at] ^= int(random.integers(1, 256))
        other = session(plain, kv="q4")
        said = ""
        try:
            other.set_state(bytes(bad), accept="any")
        except ValueError as error:
            said = str(error)
        assert said == "" or said.startswith("[state] expected")
        assert other.n_cells_used() == 0 or not said


def test_llama_says_what_was_lost(converted: Any, tmp_path: Path, capfd: Any) -> None:
    from latentkv import Llama

    path = str(converted("--method", "none", "--outtype", "f32"))
    file = tmp_path / "state.lkv"
    with Llama(path, n_ctx=256, kv="q8") as fine:
        fine.eval(fine.tokenize(b"Once upon a time there was"))
        fine.save_state(file)
    capfd.readouterr()
    with Llama(path, n_ctx=256, kv="q4", recent=16) as coarse:
        state = coarse.load_state(file)
        assert coarse.n_tokens == state.n_tokens
        (line,) = capfd.readouterr().err.splitlines()
        assert "[state]" in line
        assert next(coarse.generate([], reset=False)) >= 0
