"""What is lost when a decode step reads few rows of a long context, by how the rows are chosen.

    python bench/lab/reading.py MODEL.gguf --text prose.txt --windows 2 --code 1 --json OUT.json

MODEL is a GGUF or a checkpoint of full attention, which transformers runs in f32. Everything that is read is
exact, so the choice alone loses. The prompt of every window is read once, whole; its last tokens are then
decoded again for every setting, each query choosing its own rows. The first 4 and the latest 256 tokens are
always read, beside the room. Questions (needles, chains of variables, common words) stand behind such a
context too, and are decoded like their answers; an answer is scored with its own words as its past, a word
right where its first token is one of the words that are still to come and all others are its own.

--latent takes a file of `latentkv convert` (or a sidecar), whose factors and formats then choose too, as
stored; its K is `rotated`. The standard library of the Python that runs this is the code. Rows are printed
and written as they are measured, the important ones first; none is begun after --seconds.
"""

from __future__ import annotations

import argparse
import random
import re
import shlex
import string
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

import record
from command import arguments
from latentkv_convert.rows.quantizer import stored_rows
from record import Column

SINK, RECENT = 4, 256
CALIBRATION = 8192, 2048  # tokens, in windows of
NEVER = float("-inf")
COLUMNS = [
    Column("name", "who chooses"),
    Column("room", "rows"),
    Column("kld", "mean KLD", ".5f"),
    Column("se", "±", ".5f"),
    Column("prose", "prose", ".5f"),
    Column("code", "code", ".5f"),
    Column("p99", "99 %", ".3f"),
    Column("missed", "weight not read", ".4f"),
    Column("read", "read by a KV head", ".0f"),
    Column("union", "by any", ".0f"),
    Column("needle", "needles", ".2f"),
    Column("variables", "variables", ".2f"),
    Column("words", "common words", ".2f"),
    Column("answers", "KLD in answers", ".4f"),
    Column("bytes", "score bytes a token", ".1f"),
    Column("products", "products a token", ".0f"),
    Column("seconds", "s", ".1f"),
]


@dataclass(frozen=True)
class Setting:
    """votes: each fills an equal share of the room. `true`: by the weights themselves. `tokens`: by leading
    latents. `tiles`: by mean and variance of a tile's latents. `sum`: tokens by leading latents and their
    tile's mean and variance of all others. `last`: what the last step gave its rows; its first reads all."""

    name: str
    votes: tuple[str, ...] = ()  # (): all rows are read
    room: int = 0
    part: int = 4  # one of so many channels leads
    bits: int = 4  # of leading latents
    tile: int = 32
    basis: str = "fitted"  # whose latents: fitted, file or plain (K itself)
    whole: int = 0  # tokens come with the others of their run of so many, 0: alone
    by_mass: bool = False  # a run counts by the sum of its weights, else by the largest
    first: int = 0  # `tokens` only inside tiles that hold so many times their share, 0: anywhere
    lasts: int = 0  # steps that use one list of so many times the share, chosen by the vote itself; 0: tiles
    listed: int = 1  # neighbouring layers that use the list of the first of them
    every: int = 1  # steps that use one choice
    staggered: bool = False  # layers choose in turn
    layers: int = 1  # neighbours that use the choice of the first of them
    mean_query: bool = False  # of a KV head's query heads, else the largest weight among them
    each_kv: bool = False  # a choice for each KV head, else one for a layer

    def cost(self, heads: int, n_kv: int, channels: int, read: int) -> tuple[float, float]:
        """Bytes and products of scores for each token of the context, in a layer and step. Formats as
        `bits` says, tiles in f16."""
        bytes_, products, lead = 0.0, 0.0, leading(channels, self.part)
        queries = n_kv if self.mean_query else heads
        inside = min(1.0, self.first * self.room / len(self.votes) / read) if self.first else 1.0
        inside += 1 / self.lasts / self.listed if self.lasts else 0.0
        tiled = {"tiles", "sum"} & set(self.votes) or (self.first and not self.lasts)
        if {"tokens", "sum"} & set(self.votes):
            bytes_, products = inside * (lead * self.bits / 8 + 1), inside * queries * lead
        if tiled:
            bytes_ += 4 * channels / self.tile
            products += 2 * queries * channels / self.tile
        return bytes_ / self.every / self.layers, products / self.every / self.layers


def leading(channels: int, part: int) -> int:
    """How many of a layer's latents are one part of them, in whole runs of 16."""
    return max(16, channels // part // 16 * 16)


def settings(rooms: Sequence[int], has_file: bool) -> Iterator[Setting]:
    """The important ones first."""
    room, *others = rooms
    both = Setting("half tokens, half tiles, quarter", ("tokens", "tiles"), room)
    total = Setting("tokens with their tile, quarter", ("sum",), room)
    single = Setting("tokens, quarter", ("tokens",), room)
    true = Setting("true weights", ("true",), room)
    tiles = Setting("tiles of 32", ("tiles",), room)
    by_kind = [single, both, total]
    eighths = [named(each, "eighth", part=8) for each in by_kind]
    chief = [true, both, total, single, *eighths, tiles]
    reused = [named(both, f"every {k}", every=k) for k in (4, 2, 8, 16)]
    reused += [named(both, f"staggered {k}", every=k, staggered=True) for k in (4, 16)]
    reused += [named(both, f"{k} layers", layers=k) for k in (2, 4)]
    averaged = [named(each, "mean query", mean_query=True) for each in (both, total, single)]
    divided = [named(each, "each KV head", each_kv=True) for each in (both, total, true)]
    levels = [named(each, "in 4x tiles", first=4) for each in (single, total)]
    levels += [named(single, "in 2x tiles", first=2)]
    lists = [named(total, f"in a list of 4x for {k}", first=4, lasts=k) for k in (16, 4)]
    lists += [named(total, "in a list of 2x for 16", first=2, lasts=16)]
    lists += [named(total, "in a list of 4x for 8 and 4 layers", first=4, lasts=8, listed=4)]
    lasting = [Setting("half last, half tiles", ("last", "tiles"), room)]
    lasting += [Setting("thirds last, tokens, tiles, quarter", ("last", "tokens", "tiles"), room)]
    mixed = [named(each, "every 4", every=4) for each in (total, averaged[1], true, eighths[1], levels[0])]
    mixed += [named(each, "2 layers", layers=2) for each in (total, true, reused[0])]
    yield Setting("all")
    yield from chief
    if has_file:
        kinds = [named(each, "file", basis="file") for each in (*by_kind, *eighths)]
        yield from kinds
        yield from (named(each, "every 4", every=4) for each in kinds[1:3])
    for size in (32, 16, 8):
        for mass in (False, True):
            what = f"runs of {size}{' by mass' if mass else ''}"
            yield from (named(each, what, whole=size, by_mass=mass) for each in (total, single, true))
    yield from (named(eighths[2], f"runs of {size}", whole=size, by_mass=True) for size in (32, 16))
    yield from [*reused, *averaged, *divided, *levels, *lists, *lasting, *mixed]
    for other in others:
        yield from (replace(each, room=other) for each in chief)
    for other in others:
        cheap = [mixed[0], mixed[5], averaged[1], levels[0], lists[0], lasting[0], divided[1]]
        yield from (replace(each, room=other) for each in cheap)
    yield from [named(single, f"{bits} bits", bits=bits) for bits in (2, 6)]
    yield from [named(eighths[0], f"{bits} bits", bits=bits) for bits in (2, 6)]
    yield from [Setting("tokens, half, 2 bits", ("tokens",), room, part=2, bits=2)]
    yield from [Setting("tokens, C, 1 bit", ("tokens",), room, part=1, bits=1)]
    yield from [named(each, "tiles of 16", tile=16) for each in (both, total)]
    yield from [Setting("tiles of 16", ("tiles",), room, tile=16), named(tiles, "of K", basis="plain")]


def named(setting: Setting, what: str, **changes: Any) -> Setting:
    name = setting.name.replace("quarter", what) if "part" in changes else f"{setting.name}, {what}"
    return replace(setting, name=name, **changes)


@dataclass(frozen=True)
class Factors:
    """Of a layer's keys after RoPE: z = down · (k - mean), and q · k = q · mean + (q · up) · z."""

    mean: Tensor  # [C]
    down: Tensor  # [C, channels]
    up: Tensor  # [n_kv, head_dim, channels], zero in other groups' channels
    groups: tuple[tuple[tuple[int, str], ...], ...] = ()  # channels and formats of a file's segments

    def lead(self, channels: int) -> Tensor:
        """Which latents choose: the first, or of every group the first segments that fit, at least one."""
        if not self.groups:
            return torch.arange(channels, device=self.down.device)
        chosen: list[int] = []
        begin = 0
        for group in self.groups:
            n = group[0][0]
            for width, _ in group[1:]:
                n = n + width if n + width <= channels // len(self.groups) else n
            chosen += range(begin, begin + n)
            begin += sum(width for width, _ in group)
        return torch.tensor(chosen, device=self.down.device)

    def stored(self, z: Tensor, lead: Tensor, bits: int) -> Tensor:
        """The leading ones of latents [n, channels] as a row keeps them: a file's in its formats, others in
        segments of 32 that are evened and rotated, with one scale for a token."""
        if self.groups:
            return stored_rows(z, self.groups)[:, lead]
        width = 32 if len(lead) % 32 == 0 else 16
        x = z[:, lead].unflatten(1, (-1, width))
        spread = x.square().mean((0, 2), keepdim=True).sqrt().clamp_min(1e-9)
        turn = hadamard(width).to(z.device)
        rows = stored_rows(((x / spread) @ turn).flatten(1), [[(len(lead), f"n{bits}")]])
        return ((rows.unflatten(1, (-1, width)) @ turn.T) * spread).flatten(1)


def hadamard(n: int) -> Tensor:
    """[n, n] orthogonal, n a power of two."""
    found = torch.ones(1, 1)
    while len(found) < n:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / n**0.5


def fitted(moment: Tensor, keys: Tensor) -> Factors:
    """Principal channels of keys [n, C] as queries of this second moment [n_kv, head_dim, head_dim] see them,
    each divided by the fourth root of its variance as the converter does."""
    w, v = torch.linalg.eigh(torch.block_diag(*moment))
    w = w.clamp_min(w.max() * 1e-9).sqrt()
    root, inverse = (v * w) @ v.T, (v / w) @ v.T
    mean = keys.double().mean(0)
    y = (keys.double() - mean) @ root
    variance, u = torch.linalg.eigh(y.T @ y / len(y))
    size = variance.flip(0).clamp_min(variance.max() * 1e-9) ** 0.25
    u = u.flip(1)
    down, up = (root @ u) / size, (inverse @ u) * size
    return Factors(mean.float(), down.float(), up.float().unflatten(0, moment.shape[:2]))


def plain(n_kv: int, head_dim: int, device: str) -> Factors:
    """K itself."""
    whole = torch.eye(n_kv * head_dim, device=device)
    return Factors(torch.zeros(n_kv * head_dim, device=device), whole, whole.unflatten(0, (n_kv, head_dim)))


def of_file(path: Path, n_layer: int, n_kv: int, head_dim: int, device: str, pairs: bool) -> list[Factors]:
    """A converted file's, for keys in the order of Hugging Face's head dimensions. pairs: the architecture's
    files keep rotated dimensions side by side (docs/gguf.md, rope_pairing)."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    tensors = {each.name: each.data for each in reader.tensors}

    def key(name: str) -> list[Any]:
        found = reader.fields.get(f"latentkv.k.{name}")
        if found is None:
            raise SystemExit(f"error: [--latent] expected latentkv.k.{name}; got none in {path.name}")
        return list(found.contents())

    if set(key("path")) != {"rotated"}:
        raise SystemExit(
            f"error: [--latent] expected K rotated in all layers; got {sorted(set(key('path')))}"
        )
    counts, widths, formats = iter(key("segment_counts")), iter(key("segment_widths")), key("segment_formats")
    words = iter(formats)
    order = torch.arange(head_dim)
    order = order.view(2, -1).T.flatten() if pairs else order  # of a file's dimensions
    made = []
    for layer, per in enumerate(key("group")):
        groups = tuple(
            tuple((int(next(widths)), str(next(words))) for _ in range(int(next(counts))))
            for _ in range(n_kv // int(per))
        )
        ranks = [sum(width for width, _ in group) for group in groups]
        e = torch.tensor(tensors[f"blk.{layer}.attn_k_e.weight"]).float()  # [Σr, group·head_dim]
        q = torch.tensor(tensors[f"blk.{layer}.attn_q_e.weight"]).float()  # [n_kv, r_max, head_dim]
        down, up = torch.zeros(n_kv, head_dim, sum(ranks)), torch.zeros(n_kv, head_dim, sum(ranks))
        for head in range(n_kv):
            group, at = divmod(head, int(per))
            own = slice(sum(ranks[:group]), sum(ranks[: group + 1]))
            down[head, order, own] = e[own, at * head_dim : (at + 1) * head_dim].T
            up[head, order, own] = q[head, : ranks[group]].T
        mean = torch.zeros(n_kv * head_dim)
        made.append(Factors(mean.to(device), down.flatten(0, 1).to(device), up.to(device), groups))
    if len(made) != n_layer:
        raise SystemExit(f"error: [--latent] expected {n_layer} layers; got {len(made)} in {path.name}")
    return made


@dataclass
class Context:
    """Tokens whose keys and values are computed once, and those that every setting decodes behind them.
    pieces: tokens of an answer's words, which end the tail but for the last token."""

    kind: str
    head: list[int]
    tail: list[int]
    pieces: list[list[int]] = field(default_factory=list)
    past: Any = None
    exact: Tensor | None = None  # log-probabilities when all is read, of scored positions
    kept: dict[Any, Any] = field(default_factory=dict)  # what chooses, by layer and kind

    def scored(self) -> slice:
        return slice(len(self.tail) - sum(map(len, self.pieces)), None) if self.pieces else slice(None)

    def right(self, logs: Tensor) -> float:
        """Share of the answer's words."""
        said, at, left, found = logs.argmax(-1).tolist(), 0, [piece[0] for piece in self.pieces], 0
        for piece in self.pieces:
            found += said[at] in left and said[at + 1 : at + len(piece)] == piece[1:]
            left.remove(piece[0])
            at += len(piece)
        return found / len(self.pieces)


@dataclass
class Look:
    """Queries that choose rows of the prompt, [n_kv, heads of each, steps, …]."""

    layer: int
    query: Tensor  # [..., head_dim]
    true: Tensor  # [..., tokens] scores; behind the prompt's are the decoded tokens'
    exact: Tensor  # [steps, tokens of the prompt] always read
    keys: Tensor  # [n_kv, tokens of the prompt, head_dim]
    scale: float


class Reader:
    """A model's attention: whole for prompts, by a setting for what is decoded behind them."""

    def __init__(self, config: Any, device: str) -> None:
        self.device, self.n_layer, self.heads = device, config.num_hidden_layers, config.num_attention_heads
        self.n_kv = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.channels = self.n_kv * self.head_dim
        self.setting, self.context = Setting("all"), Context("none", [], [])
        self.factors: dict[str, list[Factors]] = {}
        self.sample: dict[int, tuple[Tensor, list[Tensor]]] | None = None  # moments of Q and keys
        self.choice: Tensor | None = None  # of the first of neighbours
        self.list: Tensor | None = None  # likewise
        self.read: list[Tensor] = []  # rows of a KV head, of any, and weight that was missed

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        if query.shape[2] == key.shape[2]:
            return self.prompt(module.layer_idx, query, key, value, scaling), None
        n, keys, values = query.shape[2], key[0].float(), value[0].float()
        q = query[0].float().unflatten(0, (self.n_kv, -1))
        scores = (q.flatten(1, 2) @ keys.mT).unflatten(1, q.shape[1:3]).mul_(scaling)
        later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores[..., -n:].masked_fill_(later, NEVER)
        if self.setting.votes:
            keep = self.chosen(module.layer_idx, q, scores, keys, scaling)
            before = scores.logsumexp(-1)
            scores[..., :-n].masked_fill_(~keep[:, None], NEVER)
            missed = 1 - (scores.logsumexp(-1) - before).exp().mean()
            rows, union = keep.sum(-1).float().mean(), keep.any(0).sum(-1).float().mean()
            self.read.append(torch.stack([rows, union, missed]))
        mixed = scores.softmax(-1).flatten(1, 2) @ values
        return mixed.view(1, self.heads, n, -1).transpose(1, 2).to(query.dtype), None

    def prompt(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Products in bf16 on a GPU: all settings share what comes of them."""
        if self.sample is not None:
            q = query[0].double().unflatten(0, (self.n_kv, -1)).flatten(1, 2)
            moment, keys = self.sample.get(layer, (torch.zeros_like(q.mT @ q), []))
            keys.append(key[0, :, SINK:].transpose(0, 1).flatten(1).float())
            self.sample[layer] = (moment + q.mT @ q, keys)
        kind = torch.bfloat16 if query.is_cuda else torch.float32
        q, k, v = (each.to(kind) for each in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        return mixed.transpose(1, 2).to(query.dtype)

    def chosen(self, layer: int, q: Tensor, true: Tensor, keys: Tensor, scale: float) -> Tensor:
        """[1 or n_kv, queries, tokens of the prompt] which are read."""
        own, n = self.setting, q.shape[2]
        if layer % own.layers and self.choice is not None:
            return self.choice
        turn = layer // own.layers % own.every if own.staggered else 0
        step = torch.arange(n, device=q.device)
        step = ((step + turn) // own.every * own.every - turn).clamp_min(0)
        steps, used = step.unique(return_inverse=True)
        token = torch.arange(true.shape[-1] - n, device=q.device)
        exact = (token < SINK) | (token > (len(token) + steps[:, None] - RECENT))
        look = Look(layer, q[:, :, steps], true[:, :, steps], exact, keys[:, : len(token)], scale)
        keep = self.with_last(look) if "last" in own.votes else self.voted(look, own.votes)
        self.choice = (keep | exact)[:, used]
        return self.choice

    def voted(self, look: Look, votes: Sequence[str]) -> Tensor:
        """Each vote's share of the room."""
        share = self.setting.room // len(self.setting.votes)
        keep: Tensor | None = None
        for vote in votes:
            if vote == "tiles":
                found = self.spread(top(self.tiles(look), share // self.setting.tile), look)
            else:
                weights = {"true": self.true, "tokens": self.tokens, "sum": self.sum}[vote](look)
                if self.setting.first and vote != "true":
                    weights = weights.masked_fill(~self.listed(look, weights, share), NEVER)
                found = self.runs(weights, share) if self.setting.whole else top(weights, share)
            keep = found if keep is None else keep | found
        assert keep is not None
        return keep

    def runs(self, weights: Tensor, share: int) -> Tensor:
        """Whole runs of tokens, as kernels read them."""
        size, n = self.setting.whole, weights.shape[-1]
        cut = torch.nn.functional.pad(weights, (0, -n % size), value=NEVER).unflatten(-1, (-1, size))
        best = cut.logsumexp(-1) if self.setting.by_mass else cut.amax(-1)
        return top(best, share // size).repeat_interleave(size, -1)[..., :n]

    def listed(self, look: Look, weights: Tensor, share: int) -> Tensor:
        """[1 or n_kv, steps, tokens of the prompt] where a vote looks: in the best tiles, or among those that
        had the largest weights some steps or layers before. Tokens that were exact then are looked at too."""
        own, steps = self.setting, weights.shape[1]
        if not own.lasts:
            return self.spread(top(self.tiles(look), own.first * share // own.tile), look)
        if look.layer % own.listed == 0 or self.list is None:
            used = torch.arange(steps, device=weights.device) // own.lasts * own.lasts
            self.list = (top(weights[:, :: own.lasts], own.first * share)).repeat_interleave(own.lasts, 1)
            self.list = self.list[:, :steps] | look.exact[used]
        return self.list

    def with_last(self, look: Look) -> Tensor:
        """A step's share for `last` goes to rows that had the largest weights in the step before, of those
        that it read."""
        n_prompt = look.exact.shape[1]
        share = self.setting.room // len(self.setting.votes)
        keep = self.voted(look, [vote for vote in self.setting.votes if vote != "last"])
        if self.setting.each_kv or self.setting.mean_query:
            raise ValueError("last: one choice for a layer, by the largest weight")
        keep[:, 0] = True
        for step in range(1, keep.shape[1]):
            scores = look.true[:, :, step - 1].clone()
            read = keep[0, step - 1] | look.exact[step - 1]
            scores[..., :n_prompt].masked_fill_(~read, NEVER)
            weights = (scores - scores.logsumexp(-1, keepdim=True))[..., :n_prompt].amax((0, 1))
            best = weights.masked_fill_(look.exact[step], NEVER).topk(min(share, n_prompt), sorted=False)
            keep[0, step, best.indices] = True
        return keep

    def true(self, look: Look) -> Tensor:
        return self.pooled(look, self.queries(look.true)[..., : look.exact.shape[1]])

    def tokens(self, look: Look) -> Tensor:
        return self.pooled(look, self.by_leading(look))

    def sum(self, look: Look) -> Tensor:
        own, scores = self.setting, self.by_leading(look)
        factors = self.factors[own.basis][look.layer]
        rest = torch.ones(factors.down.shape[1], dtype=torch.bool, device=scores.device)
        rest[factors.lead(leading(self.channels, own.part))] = False
        by_tile = self.by_tile(look, rest).repeat_interleave(own.tile, -1)
        scores[..., : by_tile.shape[-1]] += by_tile
        return self.pooled(look, scores)

    def by_leading(self, look: Look) -> Tensor:
        """[n_kv, heads of each, steps, tokens of the prompt] scores by leading latents alone."""
        own = self.setting
        factors = self.factors[own.basis][look.layer]
        lead = factors.lead(leading(self.channels, own.part))

        def make() -> Tensor:
            return factors.stored(self.latents(look, factors), lead, own.bits).half()

        z = self.once((look.layer, own.basis, own.part, own.bits), make).float()
        q = self.queries(look.query)
        mean = (q @ factors.mean.view(self.n_kv, 1, -1, 1)) * look.scale
        q = q @ factors.up[:, None, :, lead]
        return (q.flatten(1, 2) @ z.T).unflatten(1, q.shape[1:3]).mul_(look.scale).add_(mean)

    def by_tile(self, look: Look, channels: Tensor) -> Tensor:
        """[n_kv, heads of each, steps, tiles] logarithms of mean weights, were latents in a tile normal."""
        own = self.setting
        factors = self.factors[own.basis][look.layer]

        def make() -> tuple[Tensor, Tensor]:
            z = self.latents(look, factors)
            z = z[: len(z) // own.tile * own.tile].unflatten(0, (-1, own.tile))
            return z.mean(1), z.var(1, correction=0)

        mean, variance = self.once((look.layer, own.basis, "tile", own.tile), make)
        q = (self.queries(look.query) @ factors.up[:, None])[..., channels] * look.scale
        return q @ mean[:, channels].T + 0.5 * q.square() @ variance[:, channels].T

    def tiles(self, look: Look) -> Tensor:
        """[1 or n_kv, steps, tiles] logarithms of weights."""
        size = self.setting.tile
        everything = torch.ones(self.factors[self.setting.basis][look.layer].down.shape[1], dtype=torch.bool)
        scores = self.by_tile(look, everything.to(look.query.device))
        weights = scores - scores.logsumexp(-1, keepdim=True)
        exact = look.exact[:, : scores.shape[-1] * size].unflatten(1, (-1, size)).all(-1)
        return self.largest(weights).masked_fill_(exact, NEVER)

    def spread(self, tiles: Tensor, look: Look) -> Tensor:
        """[..., tokens of the prompt] of [..., tiles]; tokens behind the last whole tile are exact."""
        tokens = tiles.repeat_interleave(self.setting.tile, -1)
        return torch.nn.functional.pad(tokens, (0, look.exact.shape[1] - tokens.shape[-1]))

    def pooled(self, look: Look, scores: Tensor) -> Tensor:
        """[1 or n_kv, steps, tokens of the prompt] logarithms of weights: exact tokens have their own scores
        beside the estimates."""
        true, n_prompt = self.queries(look.true), look.exact.shape[1]
        scores = torch.where(look.exact, true[..., :n_prompt], scores)
        total = torch.logaddexp(scores.logsumexp(-1), true[..., n_prompt:].logsumexp(-1))
        return self.largest(scores.sub_(total[..., None])).masked_fill_(look.exact, NEVER)

    def largest(self, weights: Tensor) -> Tensor:
        return weights.amax(1) if self.setting.each_kv else weights.amax((0, 1))[None]

    def queries(self, of_heads: Tensor) -> Tensor:
        """Queries or scores, which are linear in them, one for a KV head where the setting says so. Scores of
        tokens that are not yet there stay so."""
        return of_heads.mean(1, keepdim=True) if self.setting.mean_query else of_heads

    def latents(self, look: Look, factors: Factors) -> Tensor:
        """[tokens of the prompt, channels]"""
        return (look.keys.transpose(0, 1).flatten(1) - factors.mean) @ factors.down

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        kept = self.context.kept
        if key not in kept:
            if self.device == "cuda" and torch.cuda.mem_get_info()[0] < 15 << 30:
                torch.cuda.empty_cache()
                if torch.cuda.mem_get_info()[0] < 15 << 30:
                    kept.clear()
            kept[key] = make()
        return kept[key]


def top(weights: Tensor, n: int) -> Tensor:
    """Where the n largest of each row are."""
    best = weights.topk(min(max(1, n), weights.shape[-1]), dim=-1, sorted=False).indices
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, best, True)


class Questions:
    """Contexts whose answers stand far away from their questions, in tokens of prose."""

    def __init__(self, encode: Callable[[str], list[int]], text: str, length: int) -> None:
        self.encode, self.length = encode, length
        self.body = encode(text)
        self.vocabulary = sorted(set(re.findall(r"\b[a-z]{5,8}\b", text)))

    def needle(self, number: int) -> Context:
        rng = random.Random(f"needle {number}")
        word, value = rng.choice(self.vocabulary), str(rng.randrange(10**6, 10**7))
        hidden = f"\n\nThe secret number of {word} is {value}. Remember it.\n\n"
        question = (
            f"\n\nQuestion: what is the secret number of {word}?\nAnswer: The secret number of {word} is"
        )
        depth = 0.08 + 0.84 * (number * 0.377 % 1)
        return self.asked("needle", "", [(depth, hidden)], question, [value], rng)

    def variables(self, number: int) -> Context:
        """A chain of five, RULER's vt in prose, behind a short one as an example."""
        rng = random.Random(f"variables {number}")
        task = "Find all variables that are assigned the value {} in the text above, one after another."
        lead = "\nAnswer: the variables that are assigned the value {} are"

        def chain() -> tuple[list[str], list[str], str]:
            names = ["".join(rng.sample(string.ascii_uppercase, 4)) for _ in range(5)]
            value = str(rng.randrange(10000, 99999))
            told = [f"VAR {names[0]} = {value}"]
            told += [f"VAR {after} = VAR {before}" for before, after in pairwise(names)]
            return names, told, f"\n\n{task}{lead}".replace("{}", value)

        names, told, question = chain()
        example = "\n".join(told) + question + "".join(f" {name}" for name in names) + "\n\n"
        names, told, question = chain()
        places = sorted(rng.uniform(0.05, 0.95) for _ in told)
        hidden = [(at, f"\n\n{each}\n\n") for at, each in zip(places, told, strict=True)]
        return self.asked("variables", example, hidden, question, names, rng)

    def words(self, number: int) -> Context:
        """Three words among others, as RULER's cwe: three of ten words in the list are one of them."""
        rng = random.Random(f"words {number}")
        chosen = rng.sample(self.vocabulary, min(len(self.vocabulary), 2003))
        asked = "the three most common words"
        question = f"\n\nQuestion: what are {asked} in the list above?\nAnswer: {asked} are"
        ids = {word: self.encode(f" {word}") for word in chosen}

        def listed(common: list[str], others: list[str], length: int) -> list[int]:
            tokens: list[int] = []
            while len(tokens) < length:
                tokens += ids[rng.choice(common if rng.random() < 0.3 else others)]
            return tokens

        example = listed(chosen[:3], chosen[3:200], min(600, self.length // 8)) + self.encode(question)
        example += self.encode("".join(f" {word}" for word in chosen[:3]) + "\n\n")
        common, others = chosen[-3:], chosen[200:-3] or chosen[:-3]
        pieces = [ids[word] for word in common]
        tail = self.encode(question) + [token for piece in pieces for token in piece]
        body = listed(common, others, self.length - len(example) - len(tail))
        head = (example + body)[: self.length - len(tail)]
        return Context("words", head, tail[:-1], pieces)

    def asked(
        self,
        kind: str,
        begin: str,
        hidden: Sequence[tuple[float, str]],
        question: str,
        answer: Sequence[str],
        rng: random.Random,
    ) -> Context:
        """hidden: texts, and the share of the context before each."""
        told = [(at, self.encode(text)) for at, text in hidden]
        first, pieces = self.encode(begin) if begin else [], [self.encode(f" {each}") for each in answer]
        tail = self.encode(question) + [token for piece in pieces for token in piece]
        length = self.length - len(first) - len(tail) - sum(len(tokens) for _, tokens in told)
        start = rng.randrange(max(1, len(self.body) - length))
        prose, head, done = self.body[start : start + length], first, 0
        for at, tokens in told:
            head = head + prose[done : int(at * len(prose))] + tokens
            done = int(at * len(prose))
        return Context(kind, head + prose[done:], tail[:-1], pieces)


class Reading:
    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.args, self.began = args, time.monotonic()
        self.rows: list[dict[str, Any]] = []
        path = args.model
        where = {"gguf_file": path.name} if path.is_file() else {}
        folder = str(path.parent if path.is_file() else path)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **where)
        self.model = model.eval().to(args.device)
        if set(getattr(model.config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
            raise SystemExit("error: [model] expected full attention in all layers; got others")
        self.reader = Reader(model.config, args.device)
        ALL_ATTENTION_FUNCTIONS.register("reading", self.reader)
        model.config._attn_implementation = "reading"
        for layer in model.model.layers:
            layer.self_attn.config._attn_implementation = "reading"
        self.say(f"{path.name}: {self.reader.n_layer} layers, {self.reader.n_kv} KV heads, loaded")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def run(self) -> None:
        prose = "\n\n".join(path.read_text(encoding="utf-8") for path in self.args.text)
        calibration = self.args.calib.read_text(encoding="utf-8")[: 10 * CALIBRATION[0]]
        self.fit(self.encode(calibration)[: CALIBRATION[0]])
        contexts = self.contexts(prose)
        for context in contexts:
            self.prepare(context)
        self.say(f"{len(contexts)} contexts of {self.args.length} tokens read")
        rooms = [int(room) for room in self.args.rooms.split(",")]
        for setting in settings(rooms, bool(self.args.latent)):
            if not re.search(self.args.only, setting.name) and setting.votes:
                continue
            if time.monotonic() - self.began > self.args.seconds:
                self.say("no time for the others")
                break
            self.note(setting, contexts)

    def fit(self, tokens: Sequence[int]) -> None:
        """Bases of all kinds. Keys and queries of the calibration text are taken after RoPE."""
        reader = self.reader
        sample = reader.sample = {}
        for begin in range(0, len(tokens), CALIBRATION[1]):
            self.past(list(tokens[begin : begin + CALIBRATION[1]]))
        reader.factors["fitted"] = [
            fitted(sample[layer][0], torch.cat(sample[layer][1])) for layer in range(reader.n_layer)
        ]
        reader.sample = None
        sizes = reader.n_kv, reader.head_dim, self.args.device
        reader.factors["plain"] = [plain(*sizes)] * reader.n_layer
        if self.args.latent:
            pairs = self.model.config.model_type == "llama"
            reader.factors["file"] = of_file(self.args.latent, reader.n_layer, *sizes, pairs)
            for layer in (0, reader.n_layer // 2, reader.n_layer - 1):
                self.say(f"layer {layer}, segments: {reader.factors['file'][layer].groups}")
            self.check(sample)
        self.say(f"bases fitted to {len(tokens)} tokens")

    def check(self, sample: dict[int, tuple[Tensor, list[Tensor]]]) -> None:
        """Says which share of the variance of q · k a file's unrounded factors lose, and exits where another
        model's lose it all."""
        lost = []
        for layer, factors in enumerate(self.reader.factors["file"]):
            keys, moment = torch.cat(sample[layer][1]), torch.block_diag(*sample[layer][0]).float()
            rebuilt = keys @ factors.down @ factors.up.flatten(0, 1).T
            moved = keys - keys.mean(0)
            wrong, whole = (((x @ moment) * x).sum() for x in (rebuilt - keys, moved))
            lost.append(float(wrong / whole))
        middle, worst = sorted(lost)[len(lost) // 2], max(lost)
        name = self.args.latent.name
        self.say(f"factors of {name} lose {middle:.2%} of q · k in the median layer, {worst:.2%} at most")
        if middle > 0.5:
            raise SystemExit(f"error: [--latent] expected factors of this model; got {name}")

    def contexts(self, prose: str) -> list[Context]:
        args, made = self.args, []
        code = "\n\n".join(
            path.read_text(encoding="utf-8", errors="replace")
            for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-h]*.py"))
        )
        for kind, text, n in (("prose", prose, args.windows), ("code", code, args.code)):
            tokens = self.encode(text[: 8 * n * args.length])
            if len(tokens) < n * args.length:
                wanted = f"{n * args.length} tokens of {kind}"
                raise SystemExit(f"error: [--windows] expected {wanted}; got {len(tokens)}")
            for begin in range(0, n * args.length, args.length):
                window = tokens[begin : begin + args.length]
                made.append(Context(kind, window[: -args.queries], window[-args.queries :]))
        questions = Questions(self.encode, prose, args.length)
        made += [questions.needle(i) for i in range(args.needles)]
        made += [questions.variables(i) for i in range(args.tasks // 2)]
        made += [questions.words(i) for i in range(args.tasks - args.tasks // 2)]
        longest = max(len(each.tail) for each in made)
        if longest + 32 > RECENT:
            raise SystemExit(f"error: [--queries] expected at most {RECENT - 32}; got {longest}")
        return made

    def prepare(self, context: Context) -> None:
        context.past = self.past(context.head)
        self.reader.setting = Setting("all")
        context.exact = self.decoded(context)

    @torch.no_grad()
    def past(self, tokens: list[int]) -> Any:
        from transformers import DynamicCache

        past = DynamicCache()
        torch.backends.cuda.matmul.allow_tf32 = True
        ids = torch.tensor([tokens], device=self.args.device)
        self.model.model(ids, past_key_values=past, use_cache=True)
        torch.backends.cuda.matmul.allow_tf32 = False
        return past

    @torch.no_grad()
    def decoded(self, context: Context) -> Tensor:
        """[scored positions, vocabulary] log-probabilities by the reader's setting."""
        self.reader.context, self.reader.choice, self.reader.list = context, None, None
        ids = torch.tensor([context.tail], device=self.args.device)
        logits = self.model(ids, past_key_values=context.past, use_cache=True).logits[0, context.scored()]
        context.past.crop(-len(context.tail))
        return logits.float().log_softmax(-1)

    def note(self, setting: Setting, contexts: Sequence[Context]) -> None:
        reader, began = self.reader, time.monotonic()
        reader.setting = setting
        nats: dict[str, list[Tensor]] = {}
        right: dict[str, list[float]] = {}
        rows: list[Tensor] = []
        for context in contexts:
            reader.read = []
            logs, exact = self.decoded(context), context.exact
            assert exact is not None
            divergence = (exact.exp() * (exact - logs)).sum(-1).double()
            nats.setdefault("answers" if context.pieces else context.kind, []).append(divergence)
            if context.pieces:
                right.setdefault(context.kind, []).append(context.right(logs))
            elif reader.read:
                rows.append(torch.stack(reader.read).mean(0))
        texts = torch.cat([x for kind, each in nats.items() if kind != "answers" for x in each])
        row: dict[str, Any] = {"name": setting.name, "room": setting.room, "kld": float(texts.mean())}
        row |= {"se": float(texts.std() / len(texts) ** 0.5), "p99": float(texts.quantile(0.99))}
        row |= {kind: float(torch.cat(each).mean()) for kind, each in nats.items()}
        row |= {kind: sum(each) for kind, each in right.items()}
        read = torch.stack(rows).mean(0).tolist() if rows else [None, None, None]
        row |= dict(zip(("read", "union", "missed"), read, strict=True))
        cost = setting.cost(reader.heads, reader.n_kv, reader.channels, self.args.length)
        row |= {"bytes": cost[0], "products": cost[1], "seconds": time.monotonic() - began}
        self.rows.append({column.key: row.get(column.key) for column in COLUMNS})
        cells = [
            f"{column.label} {record.cell(row.get(column.key), column.format)}" for column in COLUMNS[1:]
        ]
        self.say(f"{setting.name}: {', '.join(cells)}")
        record.save(
            self.args.json, command=self.command(), columns=COLUMNS, rows=self.rows, note=self.about()
        )

    def command(self) -> str:
        args = self.args
        words = ["python", "bench/lab/reading.py", args.model.name, "--calib", args.calib.name, "--text"]
        words += [path.name for path in args.text]
        words += ["--latent", args.latent.name] if args.latent else []
        for name in ("windows", "code", "length", "queries", "rooms", "needles", "tasks"):
            words += [f"--{name}", str(getattr(args, name))]
        return shlex.join([*words, "--only", args.only] if args.only else words)

    def about(self) -> str:
        args = self.args
        return (
            f"`{args.model.name}`, {args.length} tokens, the last {args.queries} decoded; {SINK} first and "
            f"{RECENT} latest tokens are always read, beside the rows of the room; K and V that are read are "
            f"exact. {args.windows} windows of prose, {args.code} of code. Right answers of {args.needles} "
            f"needles, {args.tasks // 2} chains of variables and {args.tasks - args.tasks // 2} lists of "
            f"words, a share of each by its words. Bytes and products of scores are counted, not measured. "
            f"torch {torch.__version__}, {args.device}."
        )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf", help="or a checkpoint's folder")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="prose, also around questions")
    parser.add_argument("--json", type=Path, required=True, help="is written anew")
    parser.add_argument(
        "--calib", type=Path, help="text that bases are fitted to (default: the first --text)"
    )
    parser.add_argument("--latent", type=Path, metavar="FILE.gguf", help="of latentkv convert, or a sidecar")
    parser.add_argument("--windows", type=int, default=2, help="of prose (default: 2)")
    parser.add_argument("--code", type=int, default=1, help="windows of code (default: 1)")
    parser.add_argument("--length", type=int, default=32768, help="tokens of a context")
    parser.add_argument("--queries", type=int, default=128, help="last tokens of a window that are decoded")
    parser.add_argument(
        "--rooms", default="4096,2048,8192", help="rows beside the exact ones; the first most"
    )
    parser.add_argument("--needles", type=int, default=6)
    parser.add_argument("--tasks", type=int, default=16, help="chains of variables and lists of words")
    parser.add_argument("--only", default="", metavar="REGEX", help="settings by name")
    parser.add_argument("--seconds", type=float, default=240, help="after which none begins")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.calib = args.calib or args.text[0]
    torch.set_float32_matmul_precision("highest")
    Reading(args).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
