"""Layers that keep full rows: where a layer holds few tokens, as with a sliding window, factors may take more
bytes than they save.

Full rows of such layers are priced beside latents. Each layer has what loses less at the price that the
budget sets on a byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from latentkv.plan.allocation import Group, Table, least, marginal, scores

from ..compute import floats
from ..fuse.rotation import turn
from ..ir import SIDES, ModelSpec, form
from ..rows import quantizer, sizes
from ..work import Work
from .allotment import DROP_PENALTY, Terms
from .candidates import Candidate, Shape, importance, places

LEAST = 0.25  # factors of all channels, over full rows in the widest format, from which these are priced
ROUNDS = 2  # a byte is cheaper when some layers have given up their factors

Wholes = Mapping[int, tuple[Group, ...]]  # layer -> K's and V's


def priced(work: Work, shape: Shape, slots: sizes.MiddleSlots) -> Wholes:
    """Of the layers whose factors are large beside their rows."""
    offered = [layer for layer in work.spec.row_layers if _is_offered(work, shape, slots, layer)]
    return {layer: tuple((_table(work, shape, slots, layer, side),) for side in SIDES) for layer in offered}


def chosen(candidate: Candidate, wholes: Wholes, shape: Shape, terms: Terms, spec: ModelSpec) -> Candidate:
    """The candidate with full rows in the layers that lose less with them; where the budget is not enough for
    latents, in those that need fewer bytes."""
    where = places(candidate, shape, spec)
    own = {layer: [at for side in SIDES for at in where[layer, side]] for layer in wholes}
    latents = {layer: [candidate.tables[at] for at in places] for layer, places in own.items()}
    found, rooms = candidate, terms.count.rooms(terms.count.budget)
    if least(candidate.tables) > max(rooms.values()):
        found = _with(candidate, wholes, own, [n for n in wholes if least(wholes[n]) < least(latents[n])])
    if not wholes or least(found.tables) > max(rooms.values()):
        return found
    for _ in range(ROUNDS):
        exact, _ = terms.allocated(found.tables, terms.count.budget)
        price = marginal(found.tables, rooms[exact], DROP_PENALTY)
        score = {
            layer: [scores(each, price, DROP_PENALTY).sum() for each in (wholes[layer], latents[layer])]
            for layer in wholes
        }
        found = _with(
            candidate, wholes, own, [layer for layer, (full, other) in score.items() if full <= other]
        )
    return found


def _with(
    candidate: Candidate, wholes: Wholes, own: Mapping[int, Sequence[int]], layers: Sequence[int]
) -> Candidate:
    """The candidate with full rows in these layers. own: where its groups of a layer are."""
    taken: dict[int, tuple[Group, ...]] = {at: () for layer in layers for at in own[layer]}
    taken |= {own[layer][0]: wholes[layer] for layer in layers}
    tables = [group for at, one in enumerate(candidate.tables) for group in taken.get(at, (one,))]
    return replace(candidate, tables=tables, whole=frozenset(layers))


def _is_offered(work: Work, shape: Shape, slots: sizes.MiddleSlots, layer: int) -> bool:
    if work.spec.mla is not None or work.trains or shape.has_one_row(work.spec, layer):
        return False
    spec = work.spec.at(layer)
    made = [form(spec, shape.paths[side], shape.sink > 0 or shape.recent > 0, False) for side in SIDES]
    group = work.spec.group_at(layer, 1) * spec.head_dim
    channel = sum(work.stored_as.channel_bytes(each, group, spec.n_embd) for each in made)
    rows = len(SIDES) * slots.layers[layer] * _row_bytes(spec, shape.whole_formats(spec)[0])
    return spec.kv_width * channel >= LEAST * rows


def _row_bytes(spec: ModelSpec, fmt: str) -> int:
    """spec: as the layer sees it."""
    return sizes.row_bytes((((fmt, spec.head_dim),),) * spec.n_kv)


def _table(work: Work, shape: Shape, slots: sizes.MiddleSlots, layer: int, side: str) -> Table:
    """All heads are one segment: they have one format. It is never dropped."""
    moved, spec = partial(floats.tensor, device=work.device), work.spec.at(layer)
    cached, formats = shape.whole(work, layer, side), shape.whole_formats(spec)
    weight = moved(importance(cached, cached.fisher, slice(None), spec.head_dim))
    to = moved(np.kron(np.eye(spec.n_kv), turn(work.spec, layer, side)))
    rows, metric = moved(cached.rows).double() @ to, to.T @ moved(cached.fisher) @ to
    heads = rows.float().unflatten(1, (spec.n_kv, -1))
    nats = []
    for fmt in formats:
        error = (heads - quantizer.stored(heads, fmt)).flatten(1).double()
        nats.append(float(0.5 * ((error @ metric * error).sum(1) @ weight) / len(weight)))
    cost = [_row_bytes(spec, fmt) * slots.layers[layer] if fmt != "none" else 0 for fmt in formats]
    return Table(np.array([cost]), np.array([nats]).clip(min=0).astype(np.float32).astype(np.float64))
