"""Eviction in NumPy: a llama that has all rows of all tokens, and leaves out what a policy gave up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

F64 = NDArray[np.float64]


def gumbel(layer: int, n_head: int, q: int, positions: NDArray[np.int64]) -> F64:
    """[n_head, n]: the noise of a query's scores."""

    def mixed(x: Any) -> Any:
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return x ^ x >> np.uint64(31)

    with np.errstate(over="ignore"):
        place = np.uint64(layer) << np.uint64(32) | np.arange(n_head, dtype=np.uint64)
        seeds = mixed(mixed(place) + np.uint64(q))
        bits = mixed(seeds[:, None] + positions.astype(np.uint64)[None]) >> np.uint64(41)
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) * 2.0**-23))


def softmax(x: F64) -> F64:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


class Reference:
    """One sequence, no recent window."""

    def __init__(self, path: Path, policy: str, keep: int, sink: int) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.weights = {
            name.removeprefix("model."): tensor.double().numpy()
            for name, tensor in load_file(path / "model.safetensors").items()
        }
        self.policy, self.sink, self.budget = policy, sink, keep - sink
        share = (keep - sink) * {"h2o": 50, "keyformer": 30, "snapkv": 50}[policy] // 100
        self.latest = min(share, 32) if policy == "snapkv" else share
        n_layer = self.config["num_hidden_layers"]
        self.kept: list[list[int]] = [[] for _ in range(n_layer)]  # positions behind the sinks
        self.mass: list[dict[int, float]] = [{} for _ in range(n_layer)]
        self.rows: list[tuple[list[F64], list[F64]]] = [([], []) for _ in range(n_layer)]
        self.n_tokens = self.n_decoded = 0

    def decode(self, prompt: list[int], answer: list[int], n_ubatch: int) -> NDArray[np.float64]:
        parts = [prompt[i : i + n_ubatch] for i in range(0, len(prompt), n_ubatch)]
        return np.concatenate([self.step(part) for part in [*parts, *([token] for token in answer)]])

    def make_room(self, layer: int, last: int, n: int) -> None:
        kept, mass = self.kept[layer], self.mass[layer]
        over = len(kept) + n - self.budget
        if over > 0:
            width = 2 if self.policy == "snapkv" else 0

            def pooled(at: int) -> float:
                near = [mass[p] for p in kept[max(0, at - width) : at + width + 1] if mass[p] < np.inf]
                return float(np.mean(near))

            may_go = [
                (pooled(i), p) for i, p in enumerate(kept) if p <= last - self.latest and mass[p] < np.inf
            ]
            gone = {p for _, p in sorted(may_go)[: max(over, min(32, self.budget // 8))]}
            self.kept[layer] = [p for p in kept if p not in gone]

    def step(self, ids: list[int]) -> F64:
        one = len(ids) == 1
        self.n_decoded += one
        first = self.n_tokens
        new = range(first, first + len(ids))
        entering = [p for p in new if p >= self.sink]
        x = self.weights["embed_tokens.weight"][ids]
        for layer, mass in enumerate(self.mass):
            self.make_room(layer, new[-1], len(entering))
            if self.policy == "snapkv" and not one:
                mass.update({p: 0.0 for p, of in mass.items() if of < np.inf})
            self.kept[layer] += entering
            mass.update(dict.fromkeys(new, np.inf if self.policy == "snapkv" and one else 0.0))
            x = x + self.attention(layer, self.normed(x, f"layers.{layer}.input_layernorm"), new)
            x = x + self.fed(layer, self.normed(x, f"layers.{layer}.post_attention_layernorm"))
        self.n_tokens += len(ids)
        return np.asarray(self.normed(x, "norm") @ self.weights["embed_tokens.weight"].T)

    def normed(self, x: F64, name: str) -> F64:
        power = (x**2).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"]
        return np.asarray(x / np.sqrt(power) * self.weights[f"{name}.weight"])

    def fed(self, layer: int, x: F64) -> F64:
        up, gate, down = (self.weights[f"layers.{layer}.mlp.{n}_proj.weight"] for n in ("up", "gate", "down"))
        g = x @ gate.T
        return np.asarray((g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T)

    def attention(self, layer: int, x: F64, new: range) -> F64:
        n_head, size = self.config["num_attention_heads"], self.config["head_dim"]
        w = {n: self.weights[f"layers.{layer}.self_attn.{n}_proj.weight"] for n in "qkvo"}
        q, k, v = ((x @ w[n].T).reshape(len(x), -1, size) for n in "qkv")  # [n, heads, size]
        q, k = self.turned(q, new), self.turned(k, new)
        keys, values = self.rows[layer]
        keys.extend(k)
        values.extend(v)
        out = np.zeros((len(x), n_head, size))
        for i, pos in enumerate(new):
            seen = np.array([*range(min(self.sink, pos + 1)), *(p for p in self.kept[layer] if p <= pos)])
            of = np.arange(n_head) // (n_head // k.shape[1])
            scores = np.einsum("hd,thd->ht", q[i], np.stack([keys[p] for p in seen])[:, of]) / np.sqrt(size)
            out[i] = np.einsum("ht,thd->hd", softmax(scores), np.stack([values[p] for p in seen])[:, of])
            if self.policy == "keyformer":
                tau = min(2.0, 1 + 0.01 * self.n_decoded)
                scores = (scores + gumbel(layer, n_head, pos, seen)) / tau
            if self.policy != "snapkv" or new[-1] - pos < 32:
                for p, weight in zip(seen.tolist(), softmax(scores).sum(axis=0), strict=True):
                    self.mass[layer][p] += weight
        return np.asarray(out.reshape(len(x), -1) @ w["o"].T)

    def turned(self, x: F64, positions: range) -> F64:
        half = x.shape[-1] // 2
        freqs = self.config["rope_parameters"]["rope_theta"] ** (-np.arange(half) / half)
        angle = np.array(positions)[:, None, None] * freqs
        a, b = x[..., :half], x[..., half:]
        c, s = np.cos(angle), np.sin(angle)
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
