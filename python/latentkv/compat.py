"""Arguments of llama-cpp-python's Llama that change nothing here, and what to do instead where they ask for
something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from latentkv.errors import expected

_ANY = "any"

# name: (values that ask for nothing, what to do instead)
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "flash_attn": (_ANY, ""),  # attention is always fused; require_fused makes that a condition
    "offload_kqv": ((True,), "the cache lies where the layers run: choose with n_gpu_layers"),
    "op_offload": (_ANY, ""),
    "no_perf": (_ANY, ""),
    "numa": ((False, 0), "bind the process with numactl"),
    "kv_overrides": ((None, {}), "convert the file again"),
    "rope_scaling_type": ((None, -1), "convert the file again"),
    "rope_freq_base": ((0.0,), "convert the file again"),
    "rope_freq_scale": ((0.0,), "convert the file again"),
    "yarn_ext_factor": ((-1.0,), "convert the file again"),
    "yarn_attn_factor": ((1.0, -1.0), "convert the file again"),
    "yarn_beta_fast": ((32.0, -1.0), "convert the file again"),
    "yarn_beta_slow": ((1.0, -1.0), "convert the file again"),
    "yarn_orig_ctx": ((0,), "convert the file again"),
    "attention_type": ((-1, 0), "this runtime decodes causally"),
    "embedding": (_ANY, ""),  # embed() needs no context of its own
    "swa_full": (_ANY, ""),
    "lora_base": ((None,), "merge the adapter before converting"),
    "lora_path": ((None,), "merge the adapter before converting"),
    "lora_scale": ((1.0,), "merge the adapter before converting"),
    "chat_handler": ((None,), "pass chat_template"),
    "tokenizer": ((None,), "the file's own tokenizer is used"),
}

# Those of earlier versions, which clients still pass.
_EARLIER: dict[str, tuple[Any, str]] = {
    "f16_kv": ((True,), "pass kv"),
    "low_vram": (_ANY, ""),
    "mul_mat_q": (_ANY, ""),
    "n_gqa": (_ANY, ""),
    "n_parts": (_ANY, ""),
    "rms_norm_eps": (_ANY, ""),
}


def check(arguments: Mapping[str, Any]) -> None:
    """Refuses unknown names, and values that ask for what does not exist here."""
    for name, value in arguments.items():
        known = _NEUTRAL.get(name) or _EARLIER.get(name)
        if known is None:
            raise TypeError(f"Llama() got an unexpected keyword argument {name!r}")
        values, instead = known
        if values is not _ANY and value not in values:
            allowed = " or ".join(str(v) for v in values)
            raise expected(name, allowed, repr(value), instead)
