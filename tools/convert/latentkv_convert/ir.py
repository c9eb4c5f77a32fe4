"""The values that travel between the stages of a conversion. All frozen; shapes in the comments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .frontier import Frontier

Array = NDArray[Any]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

SIDES = ("k", "v")

# Weights that read what another one reads.
READS = {"attn_k": "attn_q", "attn_v": "attn_q", "attn_qkv": "attn_q"}
READS |= {"ffn_gate": "ffn_up", "ffn_gate_exps": "ffn_up_exps", "ffn_gate_shexp": "ffn_up_shexp"}


def module_name(role: str) -> str:
    """Of a tensor's module in torch: `attn_q` of attn_q.weight, `shortconv_conv` of shortconv.conv.weight."""
    return (role.rpartition(".")[0] or role).replace(".", "_")


@dataclass(frozen=True)
class BlockSpec:
    """`latentkv.block.*`: what the one native decoder block must do (docs/gguf.md)."""

    norm: str
    activation: str
    ffn: str
    parallel: bool
    position: str
    rope_pairing: str
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of scores; None: 1/sqrt(head_dim)
    attention_softcap: float = 0.0  # of scores, 0: none
    residual_scale: float = 1.0
    yarn_truncate: bool = True  # YaRN's ramp begins and ends at whole planes
    expert_norm: bool = True  # weights of the chosen experts are divided by their sum
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none
    windows: tuple[int, ...] | None = None  # per layer, 0: none; None: the stock key's in every layer
    rope_bases: tuple[float, ...] | None = None  # per layer, 0: no RoPE; None: the stock key's in every layer
    rope_scaled: tuple[bool, ...] | None = None  # per layer, whether scaling and divisors apply; None: in all
    value_norm: bool = False  # V of a head is divided by its root mean square
    value_of_key: bool = False  # V of a layer without attn_v is what attn_k makes
    mixers: tuple[str, ...] | None = None  # per layer, what mixes tokens; None: attention in all
    gate: str = "none"  # of attention's output, made by attn_gate: of every head, or of each number
    norm_after_rope: bool = False  # heads of Q and K are normed behind RoPE, not before
    embedding_norm: bool = False  # a token's embedding is divided by its root mean square
    post_norm_epsilon: float = 0.0  # of norms of branches' outputs, 0: as of other norms
    ranked_before_sigmoid: bool = False  # experts are chosen before a sigmoid makes their scores
    output_gate: bool = False  # attn_q has a gate of as many rows behind each head; see docs/gguf.md

    def said(self) -> dict[str, Any]:
        """What a file says: the words, and what differs from its default."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        defaults = {item.name: item.default for item in fields(self)}
        return {name: value for name, value in values.items() if value != defaults[name]}


@dataclass(frozen=True)
class LayerRope:
    """RoPE of one layer."""

    base: float  # 0: none
    is_scaled: bool


@dataclass(frozen=True)
class HeadShape:
    """Heads of one layer."""

    n_kv: int
    head_dim: int
    n_rot: int  # rotated dimensions of a head
    n_head: int  # query heads
    value_of_key: bool = False  # V is what the key projection makes
    shares_kv: bool = False  # it has no K and V: it reads an earlier layer's


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: what a token's row and a head have of channels. n_kv is then 1 and
    head_dim kv_rank. A plan's V is the latent and its K the turned channels, rotated and with no basis of
    their own; in the file both are one row of V."""

    kv_rank: int  # of the latent
    n_rot: int  # turned channels of a key, which all heads share
    n_key: int  # other channels of a head's key
    n_value: int  # channels of a head's value
    q_rank: int = 0  # of the latent that queries are made of; 0: there is none

    @property
    def row(self) -> int:
        return self.n_rot + self.kv_rank

    @property
    def query(self) -> int:
        """Channels of one head; its rotated ones come last."""
        return self.n_key + self.n_rot

    def scale(self, keys: Mapping[str, Any]) -> float:
        """The scale of scores, where the block names none, by a model's stock keys;
        native/src/decoder/rope.cpp, read_mla_scale."""
        growth = 1.0
        if keys.get("rope.scaling.type") == "yarn":
            multiplier = float(keys.get("rope.scaling.yarn_log_multiplier") or 0.1)
            growth = 1 + multiplier * math.log(max(1.0, keys["rope.scaling.factor"]))
            growth *= float(keys.get("rope.scaling.attn_factor", 1.0))
        return growth * growth / math.sqrt(self.query)


@dataclass(frozen=True)
class Projection:
    """Where a checkpoint keeps q, k or v: a Linear inside a layer, and which of its output rows (None:
    all)."""

    module: str
    rows: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class TensorRole:
    """A checkpoint tensor that is copied: `source` and `target` are relative to the layer when it belongs to
    one."""

    source: str
    target: str
    kind: str = "weight"  # weight · table (embedding, output) · vector (norms, biases, routers: always f32)
    rope_heads: int = 0  # > 0: rows are this many heads whose RoPE planes need the file's pairing
    rows: NDArray[np.int64] | None = None
    transform: Callable[[F32], F32] | None = None
    n_expert: int = 0  # > 0: as many tensors, whose names have their number for the {} of `source`, stacked
    otherwise: TensorRole | None = None  # where a checkpoint has no `source`


@dataclass(frozen=True)
class ModelSpec:
    """A decoder as numbers. `keys` are stock GGUF keys without the architecture prefix.

    Where layers differ (`heads`), n_kv, head_dim and n_rot are those of most, n_head is the largest, and what
    concerns a layer asks `at(layer)`.
    """

    gguf_arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_kv: int
    head_dim: int
    n_rot: int
    n_vocab: int
    n_ctx: int
    block: BlockSpec
    layers: str  # dotted path of the ModuleList in the transformers model
    projections: Mapping[str, Projection]  # "q", "k", "v"
    global_tensors: tuple[TensorRole, ...]
    layer_tensors: tuple[TensorRole, ...]  # all of a layer except K and V projections, and Q where packed
    keys: Mapping[str, Any]
    extra_tensors: Mapping[str, F32] = field(default_factory=dict)
    latentkv_keys: Mapping[str, Any] = field(default_factory=dict)  # schema key -> value
    whole_norms: bool = False  # attn_q_norm and attn_k_norm are over all heads of a token, not over each
    packed_qkv: bool = False  # stock readers want one attn_qkv (all of Q, then K, then V), not three tensors
    heads: tuple[HeadShape, ...] = ()  # of every layer, where layers differ
    value_of_key: bool = False  # as a layer sees it: V is what the key projection makes
    shares_kv: bool = False  # as a layer sees it: it reads an earlier layer's K and V
    recurrent_tensors: tuple[TensorRole, ...] = ()  # all of a layer that does not attend
    fed_tensors: tuple[TensorRole, ...] = ()  # all of a layer that is an FFN alone
    dense_tensors: tuple[TensorRole, ...] = ()  # all of the first layers, where these have no experts
    dense_recurrent_tensors: tuple[TensorRole, ...] = ()  # all of such a layer that does not attend
    mla: Mla | None = None
    layer_numbers: Mapping[str, str] = field(
        default_factory=dict
    )  # stock key -> tensor of one number a layer

    def at(self, layer: int) -> ModelSpec:
        """The model as this layer sees it: with its own heads."""
        return self._by_shape[self.heads[layer]] if self.heads else self

    @cached_property
    def _by_shape(self) -> Mapping[HeadShape, ModelSpec]:
        return {shape: replace(self, **vars(shape), heads=()) for shape in set(self.heads)}

    @property
    def has_shared_kv(self) -> bool:
        """Whether some layer reads an earlier one's K and V."""
        return any(shape.shares_kv for shape in self.heads)

    def rows_of(self, layer: int) -> int:
        """The layer whose K and V a layer reads: where it has none, the last one before such layers that is
        of its kind, with a window or without."""
        if not self.at(layer).shares_kv:
            return layer
        kind = self.window(layer)
        own = (each for each in self.row_layers if self.window(each) == kind)
        return max(own)

    def makes_rows(self, layer: int) -> bool:
        """Whether a layer has K and V of its own."""
        return self.attends(layer) and not self.at(layer).shares_kv

    @property
    def row_layers(self) -> tuple[int, ...]:
        return tuple(filter(self.makes_rows, range(self.n_layer)))

    def group_at(self, layer: int, group: int) -> int:
        """KV heads of this layer that are as wide together as `group` heads of most layers: at least one, and
        a divisor of its heads."""
        own = self.at(layer)
        if (own.n_kv, own.head_dim) == (self.n_kv, self.head_dim):
            return group
        width = group * self.head_dim
        legal = [n for n in range(1, own.n_kv + 1) if own.n_kv % n == 0 and n * own.head_dim <= width]
        return max(legal, default=1)

    @property
    def q_width(self) -> int:
        return self.n_head * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of attn_q, with the output gate."""
        return self.q_width * (2 if self.block.output_gate else 1)

    def mixer(self, layer: int) -> str:
        return "attention" if self.block.mixers is None else self.block.mixers[layer]

    def attends(self, layer: int) -> bool:
        """Whether a layer has K and V."""
        return self.mixer(layer) == "attention"

    def recurs(self, layer: int) -> bool:
        return self.mixer(layer) not in ("attention", "none")

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(filter(self.attends, range(self.n_layer)))

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has no experts beside others that have them."""
        has_some = bool(self.dense_tensors or self.dense_recurrent_tensors)
        return has_some and layer < int(self.keys["leading_dense_block_count"])

    def tensors_of(self, layer: int) -> tuple[TensorRole, ...]:
        """All of a layer but its K and V projections."""
        if not self.attends(layer):
            if self.recurs(layer) and self.is_dense(layer) and self.dense_recurrent_tensors:
                return self.dense_recurrent_tensors
            return self.recurrent_tensors if self.recurs(layer) else self.fed_tensors
        if self.is_dense(layer):
            return self.dense_tensors
        if not self.at(layer).shares_kv:
            return self.layer_tensors
        return tuple(role for role in self.layer_tensors if not role.target.startswith("attn_k_norm."))

    @property
    def attention_scale(self) -> float:
        """Of scores."""
        usual = 1 / math.sqrt(self.head_dim) if self.mla is None else self.mla.scale(self.keys)
        return self.block.attention_scale or usual

    def window(self, layer: int) -> int:
        """Sliding window in tokens, 0: none."""
        windows = self.block.windows
        return int(self.keys.get("attention.sliding_window", 0)) if windows is None else windows[layer]

    def rope(self, layer: int) -> LayerRope:
        block = self.block
        base = 0.0
        if block.position == "rope":
            base = float(self.keys["rope.freq_base"]) if block.rope_bases is None else block.rope_bases[layer]
        return LayerRope(base, block.rope_scaled is None or block.rope_scaled[layer])

    @property
    def has_experts(self) -> bool:
        return self.block.ffn in ("experts", "plain_experts", "gated_and_experts")

    @property
    def n_embd_expert(self) -> int:
        """Numbers that an expert reads and writes."""
        return int(self.keys.get("moe_latent_size") or self.n_embd)

    def norms_whole(self, side: str) -> bool:
        """Whether Q or K is normed over all its heads together; a single head has a norm of its own."""
        return self.whole_norms and (self.n_head if side == "q" else self.n_kv) > 1

    @property
    def before_scores(self) -> str:
        """What stands between a projected key and its scores that is not linear, or ""."""
        if self.block.position == "rope":
            return "RoPE"
        if any(role.target == "attn_k_norm.weight" for role in self.layer_tensors):
            return "a norm"
        return "a clamp" if "attention.clamp_kqv" in self.keys else ""

    @property
    def kv_width(self) -> int:
        return self.n_kv * self.head_dim

    def of_side(self, side: str) -> ModelSpec:
        """With head_dim as K or V has it, which differ with MLA."""
        return self if self.mla is None or side == "v" else replace(self, head_dim=self.mla.n_rot)


@dataclass(frozen=True)
class Basis:
    """A change of coordinates for one group's K or V, columns sorted by importance: z = x·down, x ≈ z·up.

    E of the file is down.T and A is down.T·W, unless training has made `rows` of A (recover/lora.py).
    """

    sigma: F64  # [n] importance: singular values of the (weighted) outputs
    down: F64  # [group·head_dim, n]
    up: F64  # [n, group·head_dim]
    rows: F64 | None = None  # [n, n_embd]

    def truncated(self, rank: int) -> Basis:
        rows = None if self.rows is None else self.rows[:rank]
        return Basis(self.sigma[:rank], self.down[:, :rank], self.up[:rank], rows)


@dataclass(frozen=True)
class SidePlan:
    """K or V of one layer, as docs/gguf.md describes it."""

    path: str
    group: int = 1
    ranks: tuple[int, ...] = ()  # one per group; empty for `full`
    segments: tuple[tuple[int, ...], ...] = ()  # widths per group; empty for `full`
    formats: tuple[tuple[str, ...], ...] | None = None  # a row format per segment, or no plan
    one_scale: bool = False  # of a row, in formats n8 … n1: every channel has second moment 1
    regains: bool = False  # factors make up for what few bits take from the energy (fuse/energy.py)

    @property
    def kept(self) -> tuple[int, ...]:
        """Channels per group that the middle region stores; empty for `full`."""
        if self.formats is None:
            return self.ranks
        return tuple(
            sum(width for width, name in zip(widths, names, strict=True) if name != "none")
            for widths, names in zip(self.segments, self.formats, strict=False)
        )

    def cut(self) -> SidePlan:
        """Without its dropped segments."""
        if self.formats is None or not self.ranks:
            return self
        stored = [sum(name != "none" for name in names) for names in self.formats]
        return replace(
            self,
            ranks=self.kept,
            segments=tuple(widths[:n] for widths, n in zip(self.segments, stored, strict=True)),
            formats=tuple(names[:n] for names, n in zip(self.formats, stored, strict=True)),
        )


FULL = SidePlan("full")
OF_VALUE = SidePlan("value")  # of K: no rows, keys are made of those of V


def form(spec: ModelSpec, path: str, exact: bool, trained: bool) -> str:
    """Of a side (docs/gguf.md): "e", E makes latents of the projection's output, or "a", A makes them of the
    layer's input and no projection is left. spec: as the layer sees it. exact: the file keeps exact tokens;
    trained: A is.

    K that is normed over all its heads and V that is normed are no linear maps of the layer's input, so their
    latents are E's. A key projection that V is made of stays."""
    of_keys = spec.norms_whole("k") or spec.value_of_key
    is_normed = spec.block.value_norm if path == "latent" else of_keys
    return "e" if path in ("full", "rotated", "value") or is_normed or (exact and not trained) else "a"


@dataclass(frozen=True)
class LayerPlan:
    """Full and full of a layer that does not attend, whose formats, ranks and bytes count nowhere."""

    k: SidePlan
    v: SidePlan

    def side(self, name: str) -> SidePlan:
        return self.k if name == "k" else self.v

    def cut(self) -> LayerPlan:
        return replace(self, k=self.k.cut(), v=self.v.cut())


@dataclass(frozen=True)
class Forecast:
    """Divergence that a plan costs against the uncompressed model, nats per token."""

    kld: float  # measured on held-back windows, or the prediction where there are none
    predicted: float  # by the Fisher moments that allocated it
    error: float  # standard error of kld over windows; nan for fewer than two
    n_windows: int


@dataclass(frozen=True)
class Polished:
    """What training of the factors was worth; nats per token on windows that nothing was fitted to, of the
    calibration's text and of another one."""

    steps: int
    kept: int  # the step whose factors are in the file; 0: the plan's own
    before: tuple[float, ...]  # by text
    after: tuple[float, ...]

    @property
    def share(self) -> float:
        """Of the loss, that is left: the mean over texts."""
        left = [b / max(a, 1e-12) for a, b in zip(self.before, self.after, strict=True)]
        return sum(left) / len(left)


@dataclass(frozen=True)
class Master:
    """From which a file is planned anew for any byte budget when it is opened."""

    formats: tuple[str, ...]  # candidates of every segment, `none` last
    context: int  # tokens at which a share of f16 is counted
    drop_penalty: float  # by which the distortion of dropped segments counts while formats are chosen
    distortions: Mapping[str, F64]  # side -> [segments of all layers and groups, formats] nats per token
    predicted: F64  # [n] ascending: summed distortions, penalised, of plans that were measured,
    kld: F64  # [n] and what they cost in nats per token
    exact: Mapping[str, float]  # row format of exact tokens -> what it costs, beside that


@dataclass(frozen=True)
class Plan:
    """What the cache will hold: one LayerPlan per layer, and the regions of a sequence."""

    layers: tuple[LayerPlan, ...]
    sink: int = 0
    recent: int = 0
    recent_ratio: float = 0.0  # of the sequence behind its sinks
    sink_format: str = "f16"  # row formats of exact tokens
    recent_format: str = "f16"
    prefill: str = "eager"
    trained: bool = False  # A is, and so stays in the file
    fitted_context: int | None = None
    forecast: Forecast | None = None
    master: Master | None = None
    frontier: Frontier | None = None  # what it was chosen from
    polished: Polished | None = None

    @property
    def is_full(self) -> bool:
        return all(layer.k.path == "full" and layer.v.path == "full" for layer in self.layers)

    @property
    def keeps_exact(self) -> bool:
        return self.sink > 0 or self.recent > 0 or self.recent_ratio > 0

    def form(self, spec: ModelSpec, side: SidePlan) -> str:
        """spec: as the layer sees it."""
        return form(spec, side.path, self.keeps_exact, self.trained)

    def cut(self, of_latents: bool = False) -> Plan:
        """Without dropped segments, unless they are read: by exact tokens or lazy prompts that are latents,
        and by a master's other plans. of_latents: exact tokens are."""
        read = self.trained if self.keeps_exact else self.prefill == "lazy"
        if read or self.master is not None or (of_latents and self.keeps_exact):
            return self
        return replace(self, layers=tuple(layer.cut() for layer in self.layers))
