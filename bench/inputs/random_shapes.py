"""Sizes of known decoders, layer by layer, for models of random weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """K and V of a layer that attends."""

    n_kv: int
    head_dim: int
    n_rot: int
    window: bool = False
    has_v: bool = True  # False: V is made of the key projection


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of gated delta nets (docs/gguf.md): K and V heads have state_size channels."""

    n_k: int = 16
    n_v: int = 48
    state_size: int = 128
    conv_kernel: int = 4

    @property
    def channels(self) -> int:
        """Q, K and V, as the convolution takes them."""
        return (2 * self.n_k + self.n_v) * self.state_size


@dataclass(frozen=True)
class Mla:
    """Sizes of multi-head latent attention; with experts behind the first layer."""

    q_rank: int  # 0: queries are made of the input
    n_key: int  # channels of a head's key that are not turned
    n_value: int
    kv_rank: int = 512
    n_rot: int = 64
    n_expert: int = 8  # fewer than the model has: a token reads as many, and the file is smaller
    n_used: int = 4
    n_ff: int = 1536  # of an expert
    n_shared: int = 1

    @property
    def row(self) -> int:
        return self.kv_rank + self.n_rot


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_kv: int
    n_vocab: int
    rope_base: float
    head_dim: int = 128
    rope_factor: float = 1.0  # Llama-3.1's, of slow planes
    architecture: str = "llama"
    weights: str = "Q4_0"
    n_rot: int = 0  # rotated channels of a head; 0: all
    period: int = 1  # the last of so many layers is like no other: it attends, or has no window
    global_heads: Heads | None = None  # of layers without a window, where others have one
    delta_net: DeltaNet | None = None  # of layers that do not attend
    mla: Mla | None = None

    def heads(self, layer: int) -> Heads | None:
        """None: the layer has a delta net."""
        is_last = (layer + 1) % self.period == 0
        if self.delta_net and not is_last:
            return None
        if self.global_heads and is_last:
            return self.global_heads
        window = self.global_heads is not None
        return Heads(self.n_kv, self.head_dim, self.n_rot or self.head_dim, window)


SHAPES = {
    "8b": Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128256, 500000.0, rope_factor=8.0),
    "7b": Shape("Llama-2-7B", 32, 4096, 11008, 32, 32, 32000, 10000.0),
    "66b": Shape("OPT-66B", 64, 9216, 36864, 72, 72, 50272, 10000.0),
    "qwen38-27b": Shape(
        "Qwen3.8-27B", 64, 5120, 17408, 24, 4, 248320, 1e7, 256,
        architecture="qwen35", weights="Q4_K", n_rot=64, period=4, delta_net=DeltaNet(),
    ),
    "gemma4-31b": Shape(
        "Gemma-4-31B", 60, 5376, 21504, 32, 16, 262144, 1e6, 256,
        architecture="gemma4", weights="Q4_K", period=6, global_heads=Heads(4, 512, 512, has_v=False),
    ),
    "glm47-flash": Shape(
        "GLM-4.7-Flash", 47, 2048, 10240, 20, 1, 154880, 1e6, 576,
        architecture="deepseek2", n_rot=64, mla=Mla(768, 192, 256),
    ),
    "deepseek-v2-lite": Shape(
        "DeepSeek-V2-Lite", 27, 2048, 10944, 16, 1, 102400, 1e4, 576,
        architecture="deepseek2", n_rot=64, mla=Mla(0, 128, 128, n_used=6, n_ff=1408, n_shared=2),
    ),
    "tiny-mla": Shape(
        "tiny MLA", 2, 256, 512, 4, 1, 512, 1e4, 576,
        architecture="deepseek2", n_rot=64, mla=Mla(96, 64, 64, n_used=2, n_ff=64),
    ),
    "tiny": Shape("tiny", 2, 256, 512, 4, 2, 512, 10000.0, 64),
    "small": Shape("small", 2, 512, 1024, 16, 4, 512, 500000.0, rope_factor=8.0),
}  # fmt: skip
