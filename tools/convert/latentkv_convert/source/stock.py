"""The keys of a stock GGUF, checked, as an architecture reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .. import limits
from ..errors import ConvertError

# Keys that change what the tensors mean, and the values with which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_gating_func": (0, 1),  # softmax
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0.0, 1.0),
}

NO_ARCHITECTURE = "xielu."  # keys of a model that have no architecture's prefix

# Numbers that files give once, or once for every layer.
_PER_LAYER = (
    "feed_forward_length",
    "expert_feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
)


class Stock:
    """`values`: keys without the architecture's prefix. `roles`: names of the file's tensors; those of the
    first layer are without `blk.0.`."""

    def __init__(self, where: str, values: Mapping[str, Any], roles: Collection[str], n_vocab: int) -> None:
        self.where, self.n_vocab = where, n_vocab
        self.values = {name: self._of_every_layer(values, name) for name in values}
        self._roles = roles

    def of_layer(self, layer: int, is_local: bool) -> Stock:
        """The keys as one layer sees them. is_local: the layer has a window; its `…_swa` keys then replace
        the others."""
        swa = "_swa"
        found = {
            name: value[layer] if name in _PER_LAYER and isinstance(value, list) else value
            for name, value in self.values.items()
        }
        own = {name.removesuffix(swa): value for name, value in found.items() if name.endswith(swa)}
        kept = Stock(self.where, {}, self._roles, self.n_vocab)
        kept.values = found | own if is_local else found
        return kept

    def _of_every_layer(self, values: Mapping[str, Any], name: str) -> Any:
        """The value of a key. A list with one number for each layer becomes that number if all are equal."""
        value = values[name]
        if name not in _PER_LAYER or not isinstance(value, list):
            return value
        n_layer = values.get("block_count")
        if len(value) != n_layer:
            raise ConvertError(
                self.where, f"{name} once, or {n_layer} times, for every layer", str(len(value))
            )
        return value[0] if all(other == value[0] for other in value) else value

    def check(self, read: Collection[str]) -> None:
        """read: keys that the architecture follows.

        Raises:
            ConvertError: another that changes what the tensors mean.
        """
        for name, neutral in _NEUTRAL.items():
            if name not in read and self.values.get(name, neutral[0]) not in neutral:
                got = str(self.values[name])[:40]
                raise ConvertError(self.where, f"{name} {' or '.join(map(str, neutral))}", got)

    def has(self, role: str) -> bool:
        return role in self._roles

    def has_in(self, role: str, layer: int) -> bool:
        return self.has(role if layer == 0 else f"blk.{layer}.{role}")

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if name in _PER_LAYER and isinstance(value, list):
            layer = next(index for index, other in enumerate(value) if other != value[0])
            got = f"{value[0]} and, in layer {layer}, {value[layer]}"
            raise ConvertError(self.where, f"{name} the same in every layer", got)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            got = "none" if value is None else str(value)[:40]
            raise ConvertError(self.where, f"{name} from {low} to {high}", got)
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if value is None:
            raise ConvertError(self.where, f"the key {name}", "none")
        return limits.number(self.where, name, value, low, high)

    def sizes(self) -> dict[str, Any]:
        """What every architecture has, by the names of config.json."""
        n_head = self.whole("attention.head_count", 1, 4096)
        n_embd = self.whole("embedding_length", 1, 1 << 20)
        head_dim = self.whole("attention.key_length", 1, 4096, n_embd // n_head)
        if self.whole("attention.value_length", 1, 4096, head_dim) != head_dim:
            got = str(self.values["attention.value_length"])
            raise ConvertError(self.where, f"attention.value_length {head_dim}, the key length", got)
        return {
            "hidden_size": n_embd,
            "num_hidden_layers": self.n_layer(),
            "intermediate_size": self.whole("feed_forward_length", 1, 1 << 22, self._expert_width()),
            "num_attention_heads": n_head,
            "num_key_value_heads": self.whole("attention.head_count_kv", 1, 4096, n_head),
            "head_dim": head_dim,
            "max_position_embeddings": self.whole("context_length", 1, 1 << 30),
            "vocab_size": self.n_vocab,
            "rope_theta": self.number("rope.freq_base", *limits.ROPE_BASE, default=10000.0),
            "tie_word_embeddings": not self.has("output.weight"),
        }

    def n_layer(self) -> int:
        """The number of the decoder's layers, without the blocks after them that predict further tokens."""
        n_blocks = self.whole("block_count", 1, 4096)
        return n_blocks - self.whole("nextn_predict_layers", 0, n_blocks - 1, 0)

    def _expert_width(self) -> int | None:
        """The width of experts, for files that have no other FFN."""
        width = self.values.get("expert_feed_forward_length")
        return width if isinstance(width, int) else None

    def window(self) -> int | None:
        """attention.sliding_window, in tokens."""
        return self.whole("attention.sliding_window", 0, (1 << 32) - 1, 0) or None

    def local_layers(self, n_layer: int, usual: int, first_is_full: bool = False) -> list[bool]:
        """Which layers have a window: all but the last (or the first) of every `usual`, unless the file lists
        them."""
        name = "attention.sliding_window_pattern"
        pattern = self.values.get(name)
        if not isinstance(pattern, list):
            period = self.whole(name, 1, 1 << 16, usual)
            return [(layer + (not first_is_full)) % period != 0 for layer in range(n_layer)]
        if len(pattern) != n_layer:
            raise ConvertError(self.where, f"{n_layer} values of {name}, one a layer", str(len(pattern)))
        return [bool(local) for local in pattern]
