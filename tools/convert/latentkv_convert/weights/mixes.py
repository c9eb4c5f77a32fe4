"""K-quant files mix types: tensors that are small, or whose errors do most harm, get more bits. The rules are
those of llama.cpp's quantizer for dense decoders, so that both make files of the same size."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConvertError, warn
from ..recipe import Recipe

# Outtype -> what a weight gets that no rule below names.
BASE = {"q4_k_m": "q4_k", "q5_k_m": "q5_k", "q6_k": "q6_k", "iq4_xs": "iq4_xs"}
# Rows that are no multiple of 256: the type with blocks of 32 that is next in size.
NARROW = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "iq4_xs": "iq4_nl"}
SUPER, BLOCK = 256, 32  # elements of a K-quant's block, and of the others'


@dataclass(frozen=True)
class Mix:
    """The mix for one model. `important`: there is an importance matrix."""

    outtype: str
    architecture: str
    n_layer: int
    n_group: int  # query heads per KV head
    tied: bool  # the token table is the output too
    important: bool

    def type_of(self, role: str, layer: int | None, shape: tuple[int, ...]) -> str:
        """role: the tensor's name without `blk.N.` and `.weight`. A type that its rows can hold."""
        if role == "position_embd":
            return "f16"
        return self._held(self._wanted(role, layer), shape[-1])

    def _wanted(self, role: str, layer: int | None) -> str:
        base = BASE[self.outtype]
        if role == "output" or (role == "token_embd" and self.tied):
            return "q8_0" if self.architecture == "falcon" else "q6_k"
        if layer is None:
            return base
        if role == "attn_v":
            return self._values(layer, base)
        if role == "attn_qkv":
            return {"q4_k_m": "q5_k", "q5_k_m": "q6_k"}.get(self.outtype, base)
        if role in ("ffn_down", "ffn_down_exps"):
            return self._ffn_down(layer, base)
        return base

    def _values(self, layer: int, base: str) -> str:
        """V of grouped heads is small; of 80 layers llama.cpp assumes eight query heads per KV head."""
        if self.outtype == "iq4_xs" and self.n_group >= 4:
            return "q5_k"
        if self.outtype in ("q4_k_m", "q5_k_m") and self._more_bits(layer):
            return "q6_k"
        return "q5_k" if self.n_layer == 80 and base == "q4_k" else base

    def _ffn_down(self, layer: int, base: str) -> str:
        if self.outtype == "q4_k_m" and self.architecture == "falcon":
            if layer < self.n_layer // 16:
                return "q6_k"
            return "q5_k" if self._more_bits(layer) else base
        if self.outtype in ("q4_k_m", "q5_k_m") and self._more_bits(layer):
            return "q6_k"
        if self.outtype == "iq4_xs" and layer < self.n_layer // 8 and not self.important:
            return "q5_k"
        return base

    def _more_bits(self, layer: int) -> bool:
        """The first eighth of the layers, the last, and every third between."""
        first, last = self.n_layer // 8, 7 * self.n_layer // 8
        return layer < first or layer >= last or (layer - first) % 3 == 2

    @staticmethod
    def _held(kind: str, width: int) -> str:
        if kind in NARROW and width % SUPER:
            kind = NARROW[kind]
        return "f16" if width % BLOCK else kind


def measures_importance(recipe: Recipe, outtype: str) -> bool:
    """Whether K-quants are searched for with an importance matrix of the calibration text.

    Raises:
        ConvertError: --imatrix or --no-imatrix where it would change nothing.
    """
    if outtype not in BASE:
        if recipe.imatrix is not None:
            option = "--imatrix" if recipe.imatrix else "--no-imatrix"
            raise ConvertError(option, f"--outtype {', '.join(BASE)} beside it", f"--outtype {outtype}")
        return False
    if recipe.imatrix is not False and not recipe.calib:
        if recipe.imatrix:
            raise ConvertError("--imatrix", "a text to measure it on, --calib FILE", "none")
        warn("--calib", f"a text for the importance matrix of {outtype}", "none", "quantized without one")
    return recipe.imatrix is not False and bool(recipe.calib)
