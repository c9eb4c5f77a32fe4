"""What a model loses when decoded tokens see only those rows of the middle that an index asks for.

    git apply bench/lab/host_rows.patch && pip install .
    python bench/lab/host_rows.py smollm2 --save host-rows-smollm2

The idea (`--kv-host`): rows of the middle lie in the host's memory, the leading channels of K on the GPU as
an index; a step scores all tokens by these and fetches the best ones whole. The patch makes the CPU op do
that with rows that are all at hand, as LKV_HOST_ROWS="share index unit by_group highest rest" says
(native/src/ops/cpu/host_rows.h); layers with a window keep all they have. A prompt is read with every row in
sight, then tokens are decoded one by one and scored against f16 rows. Numbers are hidden in the prompt; the
questions for them are decoded too. Each row of the result is kept when it is measured; the same command goes
on where it was stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

import methods
import needles
from answering import answers
from command import latentkv
from inputs import hide, real_models, texts
from latentkv_convert.rows.sizes import segment_bytes
from record import RESULTS, Column, save

VARIABLE = "LKV_HOST_ROWS"
LEAST = 0.001  # fetched: next to nothing
LIMIT = 12  # tokens of an answer
SAME = 1e-4  # nats between every row fetched and the cache as it is: sums in another order
COLUMNS = [
    Column("index", "index"),
    Column("index_bytes", "of a row's bytes", ".0%"),
    Column("unit", "tokens together"),
    Column("choice", "chosen for a"),
    Column("rest", "others"),
    Column("share", "fetched", ".1%"),
    Column("kld", "mean KLD", ".5f"),
    Column("se", "±", ".5f"),
    Column("times", "of all rows'", ".2f", "x"),
    Column("times_se", "±", ".2f"),
    Column("median", "median", ".5f"),
    Column("p999", "99.9 %", ".3f"),
    Column("same_top", "same top", ".1%"),
    Column("found", "found"),
]


@dataclass(frozen=True)
class Choice:
    share: float  # of a token's middle rows, fetched whole
    index: float = (
        1.0  # the index has at least this share of a row's bytes; 1: all of K, which are true scores
    )
    unit: int = 1  # consecutive tokens that are fetched together
    by_group: bool = False  # every K latent chooses for itself, else a layer's do together
    highest: bool = False  # a token is worth its largest probability over the heads, else their sum
    rest: float = (
        -1.0
    )  # other tokens are seen by the index, which has as much of V as of K; negative: they are not

    def set(self) -> None:
        words = (self.share, self.index, self.unit, int(self.by_group), int(self.highest), self.rest)
        os.environ[VARIABLE] = " ".join(map(str, words))


def named(choice: Choice | None) -> dict[str, Any]:
    """A row's first columns."""
    if choice is None:
        return {"index": "all rows", "unit": None, "choice": "–", "rest": "–", "share": None}
    index = f"{choice.index:.0%} or more" if choice.index else "first segment"
    return {
        "index": "all of K" if choice.index >= 1 else index,
        "unit": choice.unit,
        "choice": ("latent" if choice.by_group else "layer") + (", by the highest" if choice.highest else ""),
        "rest": "by the index" if choice.rest >= 0 else "not seen",
        "share": choice.share,
    }


def set_choice(choice: Choice | None) -> None:
    if choice is None:
        os.environ.pop(VARIABLE, None)
    else:
        choice.set()


def choices(shares: Sequence[float], indices: Sequence[float], groups: int) -> list[Choice]:
    """Every share with the true scores and every index; then what else could be done, at two shares."""
    two = [share for share in shares if share in (0.05, 0.1)] or list(shares[:2])
    made = [Choice(share, index) for index in (1.0, *indices) for share in sorted(shares, reverse=True)]
    made += [Choice(share, index, rest=index) for index in indices for share in (*two, 0.01, LEAST)]
    made += [Choice(share, index, unit=16) for index in (1.0, *indices[:1]) for share in two]
    made += [Choice(share, highest=True) for share in two]
    if groups > 1:
        made += [Choice(share, index, by_group=True) for index in (1.0, *indices) for share in two]
    return made


def index_share(model: Any, choice: Choice) -> float:
    """Bytes of the index over those of whole rows, in layers that see all tokens; segments as the op takes
    them."""
    held = whole = 0.0
    windows = model.metadata.get("latentkv.block.windows") or [0] * model.n_layer
    for layer, window in zip(model.layers, windows, strict=True):
        if window:
            continue
        k, v = (_bytes(layer[side]) for side in "kv")
        k_bytes, v_bytes = (sum(map(sum, side)) for side in (k, v))
        whole += k_bytes + v_bytes
        held += sum(_leading(group, choice.index * (sum(group) + v_bytes / len(k))) for group in k)
        if choice.rest >= 0:
            held += sum(_leading(group, choice.rest * (sum(group) + k_bytes / len(v))) for group in v)
    return held / whole


def _bytes(side: dict[str, Any]) -> list[list[int]]:
    """Of every segment of every group."""
    groups = zip(side["formats"], side["segments"], strict=True)
    return [[segment_bytes(f, w) for f, w in zip(names, widths, strict=True)] for names, widths in groups]


def _leading(segments: Sequence[int], least: float) -> int:
    """The fewest leading ones' bytes that reach `least`, at least one segment's."""
    sums = list(itertools.accumulate(segments))
    return next((total for total in sums if total >= least - 1e-6), sums[-1])


@dataclass(frozen=True)
class Needle:
    word: str
    number: str

    @property
    def sentence(self) -> str:
        return f" The magic number for {self.word} is {self.number}."

    @property
    def question(self) -> str:
        """Put behind the text; the number is what comes next."""
        return f"\n\nThe magic number for {self.word} is"


@dataclass(frozen=True)
class Window:
    """Tokens with needles among the first `first`; what comes behind is scored."""

    tokens: list[int]
    first: int
    needles: list[Needle]


def windows_of(model: Any, text: str, args: argparse.Namespace) -> list[Window]:
    """The text in stretches of n_ctx tokens, a needle behind the first full stop past each depth."""
    rng = random.Random(0)
    tokens = model.tokenize(text.encode(), False, False)
    made, at = [], 0
    for _ in range(args.chunks):
        words = rng.sample(hide.WORDS, args.needles)
        hidden = [Needle(word, str(rng.randrange(1_000_000, 10_000_000))) for word in words]
        window = [model.token_bos()] if model.add_bos() else []
        for i, needle in enumerate(hidden):
            depth = int((i + 0.5) / args.needles * (args.ctx_size - args.scored))
            while len(window) < depth or not model.token_to_piece(window[-1]).rstrip().endswith(b"."):
                window.append(tokens[at])
                at += 1
            window += model.tokenize(needle.sentence.encode(), False, False)
        more = args.ctx_size - len(window)
        if at + more > len(tokens):
            raise SystemExit(f"error: [--chunks] expected {args.chunks} windows; got {len(made)}; lower -c")
        made.append(Window([*window, *tokens[at : at + more]], args.ctx_size - 1 - args.scored, hidden))
        at += more
    return made


def ratio(kld: NDArray[np.float64], usual: NDArray[np.float64]) -> tuple[float, float]:
    """Of two means over the same tokens, and its standard error (delta method).

    >>> ratio(np.array([2.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0]))
    (2.0, 0.0)
    """
    found = kld.mean() / usual.mean()
    return float(found), float(np.std(kld - found * usual) / np.sqrt(kld.size - 1) / usual.mean())


class Decoded:
    """Windows in one session: their prompts read once and kept, then decoded under any choice."""

    def __init__(self, cache: answers.Cache, windows: Sequence[Window], threads: int, state: Path) -> None:
        self.windows, self.model = windows, cache.model
        self.every = list(range(len(windows)))
        room = len(windows), sum(len(window.tokens) for window in windows)
        if not state.exists():
            set_choice(None)
            both = {"n_threads": threads, "n_threads_batch": threads}
            session = answers.Cache(cache.model, cache.options | both).session(*room)
            for seq, window in enumerate(windows):
                session.decode(window.tokens[: window.first], seq=[seq] * window.first, output="none")
            partial = state.with_suffix(".partial")
            partial.write_bytes(session.state_bytes())
            partial.replace(state)
        self._session = cache.session(*room)
        self._state = state.read_bytes()

    def _step(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._session.decode(list(tokens), seq=self.every, output="all")
        return logits

    def logits(self, choice: Choice | None, steps: int) -> Iterator[NDArray[np.float32]]:
        """[windows, n_vocab] behind each of the first `steps` scored tokens."""
        self._session.set_state(self._state)
        set_choice(choice)
        for step in range(steps):
            yield self._step([window.tokens[window.first + step] for window in self.windows])
        set_choice(None)

    def found(self, choice: Choice | None) -> list[bool]:
        """Which needles come back, question by question, window by window."""
        hits = []
        for i in range(len(self.windows[0].needles)):
            self._session.set_state(self._state)
            asked = [window.needles[i] for window in self.windows]
            for said, needle in zip(self._said(choice, asked), asked, strict=True):
                hits.append(needles.contains(said, needle.number))
        return hits

    def _said(self, choice: Choice | None, asked: Sequence[Needle]) -> list[str]:
        prompts = [self.model.tokenize(needle.question.encode(), False, False) for needle in asked]
        said: list[list[int]] = [[] for _ in asked]
        set_choice(choice)
        for step in range(max(map(len, prompts)) + LIMIT):
            fed = [(prompt + answer)[step] for prompt, answer in zip(prompts, said, strict=True)]
            following = self._step(fed).argmax(axis=1).tolist()
            for prompt, answer, token in zip(prompts, said, following, strict=True):
                if step >= len(prompt) - 1:
                    answer.append(token)
        set_choice(None)
        return [self.model.detokenize(answer, False).decode("utf-8", errors="replace") for answer in said]


class Measured:
    def __init__(self, args: argparse.Namespace) -> None:
        from latentkv import _core

        self.args = args
        self.source = real_models.model_path(args.model)
        words = shlex.split(args.words)
        stem = "-".join([self.source.stem, *(word.lstrip("-") for word in words)])
        sizes = f"{args.ctx_size}-{args.scored}-{args.chunks}-{args.needles}"
        self.usual = Path(
            f"{args.work / stem}-{sizes}.usual.npy"
        )  # nats of every scored token, all rows seen
        self.plain_stem, self.stem = (str(args.work / f"{name}-{sizes}") for name in (self.source.stem, stem))
        args.work.mkdir(parents=True, exist_ok=True)
        self.file = args.work / f"{stem}.latent.gguf"
        if not self.file.exists():
            latentkv("convert", str(self.source), "-o", str(self.file), "--no-plot", *words)
        one = {"n_threads": 1, "n_threads_batch": 1}  # the patched op takes one
        self.plain = answers.Cache(_core.Model(str(self.source)), {"kv": "f16"} | one)
        self.cache = answers.Cache(_core.Model(str(self.file)), one)
        self.windows = windows_of(self.plain.model, "\n".join(texts.chapters()[1]), args)

    @cached_property
    def decoded(self) -> Decoded:
        return Decoded(self.cache, self.windows, self.args.threads, Path(f"{self.stem}.latent.state"))

    def reference(self) -> tuple[NDArray[np.float32], list[bool]]:
        """f16 rows' logits [scored, windows, n_vocab], and the needles that they find."""
        logits, found = (Path(f"{self.plain_stem}.{kind}") for kind in ("logits.npy", "found.json"))
        if not found.exists():
            f16 = Decoded(self.plain, self.windows, self.args.threads, Path(f"{self.plain_stem}.state"))
            np.save(logits, np.stack(list(f16.logits(None, self.args.scored))))
            found.write_text(json.dumps(f16.found(None)), encoding="utf-8")
        return np.load(logits, mmap_mode="r"), json.loads(found.read_text(encoding="utf-8"))

    def check(self) -> None:
        """Every row fetched is the cache as it is; hardly any is another."""
        from latentkv.measure.divergence import score

        def logits(choice: Choice | None) -> NDArray[np.float32]:
            return np.concatenate(list(self.decoded.logits(choice, 8)))

        usual = logits(None)
        targets = np.zeros(len(usual), dtype=np.int32)
        for choice, least, most in (
            (Choice(1.0, 0.0), 0.0, SAME),
            (Choice(1.0, 0.0, rest=0.0), 0.0, SAME),
            (Choice(LEAST, 0.0), 10 * SAME, np.inf),
        ):
            kld = score(logits(choice), targets, usual).kld
            assert kld is not None
            if not least <= kld.mean() <= most:
                raise SystemExit(
                    f"error: [host_rows] expected {least:g} … {most:g} nats with {choice.share:.1%} fetched; "
                    f"got {kld.mean():g}; apply bench/lab/host_rows.patch and install"
                )

    def scores(self, choice: Choice | None, reference: NDArray[np.float32]) -> Any:
        """latentkv.measure.divergence.Scores of all scored tokens."""
        from latentkv.measure.divergence import concatenate, score

        parts = []
        for step, logits in enumerate(self.decoded.logits(choice, self.args.scored)):
            targets = np.array([w.tokens[w.first + step + 1] for w in self.windows], dtype=np.int32)
            parts.append(score(logits, targets, reference[step]))
        return concatenate(parts)

    def row(self, choice: Choice | None) -> dict[str, Any]:
        from latentkv.measure.divergence import summary

        reference, _ = self.reference()
        scores = self.scores(choice, reference)
        result = summary(scores)
        kld = result["kld"]
        if choice is None:
            np.save(self.usual, scores.kld)
        times, times_se = ratio(scores.kld, np.load(self.usual))
        return named(choice) | {
            "index_bytes": index_share(self.cache.model, choice) if choice else None,
            "kld": kld["mean"],
            "se": kld["mean_se"],
            "times": times,
            "times_se": times_se,
            "median": kld["median"],
            "p999": kld["p999"],
            "same_top": result["same_top"],
            "found": sum(self.decoded.found(choice)),
        }

    def run(self) -> None:
        args = self.args
        result = RESULTS / f"{args.save}.json"
        command = "python bench/lab/host_rows.py " + shlex.join(sys.argv[1:])
        rows = methods.finished(result, command, args.restart)
        groups = len(self.cache.model.layers[-1]["k"]["segments"])
        grid = [None, *choices(args.shares, args.indices, groups)]
        names = [named(choice) for choice in grid]
        if len(rows) < len(grid):
            self.check()
        for choice, name in zip(grid, names, strict=True):
            if any(name.items() <= row.items() for row in rows):
                continue
            rows.append(self.row(choice))
            rows.sort(key=lambda row: names.index({key: row[key] for key in name}))
            print(*rows, sep="\n", flush=True)
            save(result, command=command, columns=COLUMNS, rows=rows, note=self.note(groups))

    def note(self, groups: int) -> str:
        args, found = self.args, self.reference()[1]
        made_by = f"convert {args.words}".strip()
        return (
            f"`{self.source.name}`, as `{made_by}` writes it, {groups} latents of K a layer; the held-out "
            f"text of `bench/inputs/texts.py` in {args.chunks} windows of {args.ctx_size} tokens, the last "
            f"{args.scored} of each decoded one by one. KLD in nats per token against f16 rows. Found: of "
            f"{len(found)} numbers of seven digits, {args.needles} in each window, question and answer "
            f"decoded; f16 rows find {sum(found)}."
        )


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",") if word]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help=f"{', '.join(real_models.MODELS)} or a GGUF")
    parser.add_argument("--words", default="", help="options of convert (default: none)")
    parser.add_argument("--shares", type=numbers, default=[0.01, 0.02, 0.05, 0.1, 0.2])
    parser.add_argument("--indices", type=numbers, default=[0.0, 0.45], help="shares of a row's bytes")
    parser.add_argument("-c", "--ctx-size", type=int, default=8192)
    parser.add_argument("--chunks", type=int, default=2, help="windows (default 2)")
    parser.add_argument("--scored", type=int, default=384, help="decoded tokens of each (default 384)")
    parser.add_argument("--needles", type=int, default=8, help="numbers hidden in each (default 8)")
    parser.add_argument("-t", "--threads", type=int, default=2, help="for prompts (default 2)")
    parser.add_argument("--work", type=Path, default=Path("build/host-rows"), help="where files go")
    parser.add_argument("--save", required=True, metavar="NAME", help="bench/results/NAME.json")
    parser.add_argument("--restart", action="store_true", help="forget finished rows")
    Measured(parser.parse_args()).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
