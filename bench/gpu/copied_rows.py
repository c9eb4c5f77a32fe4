"""Caches that are deep at once: rows of a sequence's first tokens, again and again at later positions.

What attention costs does not depend on what is attended to, while computing a prompt of 131072 tokens takes
minutes on a card in kind.
"""

from __future__ import annotations

import re
import struct

import numpy as np

from latentkv import _core

MAGIC = b"LKVS"
HEAD = struct.Struct("<4sIQI16sI")  # of a state: what cache/state/writer.h describes
REGION = struct.Struct("<16sII")
NAME = re.compile(rb"(?:recent|middle)\0{10}")
N_HEAD, N_BODY, N_TAIL = 512, 2048, 1536  # tokens; the body's are copied, and windows lie in the others
COPIED_FROM = N_HEAD + N_BODY + N_TAIL


def regions(state: bytes) -> dict[str, tuple[int, int, int]]:
    """Of each region: where its tokens begin, where they end, how many there are."""
    at = state.index(MAGIC)
    n_regions = HEAD.unpack_from(state, at)[3]
    at += HEAD.size
    found = {}
    for left in reversed(range(n_regions)):
        name, n_layers, n_used = REGION.unpack_from(state, at)
        at += REGION.size
        for _ in range(2 * n_layers):  # layouts of K and V
            n_groups = int.from_bytes(state[at : at + 4], "little")
            at += 4
            for _ in range(n_groups):
                at += 4 + 8 * int.from_bytes(state[at : at + 4], "little")
        end = at
        if n_used:
            following = NAME.search(state, at) if left else None
            end = following.start() if following else len(state)
        found[name.rstrip(b"\0").decode()] = (at, end, n_used)
        at = end
    return found


def shifted(state: bytes, by: int) -> bytes:
    """The same tokens at positions that are `by` further."""
    out = np.frombuffer(state, np.uint8).copy()
    for at, end, n_used in regions(state).values():
        if n_used == 0:
            continue
        tokens = out[at:end].reshape(n_used, -1)
        positions = tokens[:, 4:8].copy().view("<i4")
        positions[positions >= 0] += by  # others are free slots of a block
        tokens[:, 4:8] = positions.view(np.uint8)
    return out.tobytes()


class Copies:
    """What a session can be filled with whose sequence 0 has COPIED_FROM tokens."""

    def __init__(self, session: _core.Session) -> None:
        if session.seq_pos_max(0) + 1 != COPIED_FROM:
            raise ValueError(f"[copies] expected {COPIED_FROM} tokens; got {session.seq_pos_max(0) + 1}")
        self._session = session
        sinks = regions(session.seq_state_parts(0, [0, N_HEAD])[0]).get("sink", (0, 0, 0))[2]
        first = sinks + N_HEAD  # where a block of tokens begins
        self._head, body, self._tail = session.seq_state_parts(0, [0, first, first + N_BODY])
        self._bodies = [body]

    def fill(self, depth: int) -> None:
        """Makes the sequence `depth` tokens long.

        Raises:
            ValueError: `depth` is not COPIED_FROM and some times N_BODY.
        """
        n, rest = divmod(depth - COPIED_FROM, N_BODY)
        if rest or n < 0:
            raise ValueError(
                f"[copies] expected {COPIED_FROM} tokens and a multiple of {N_BODY} more; got {depth}"
            )
        while len(self._bodies) <= n:
            self._bodies.append(shifted(self._bodies[0], len(self._bodies) * N_BODY))
        tail = shifted(self._tail, n * N_BODY)
        self._session.set_seq_state(0, [self._head, *self._bodies[: n + 1], tail])
