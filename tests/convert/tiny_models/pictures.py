"""Text parts of models that see pictures."""

from __future__ import annotations

from typing import Any

from . import dense, routed

TINY: dict[str, dict[str, Any]] = {}

TINY["gemma4"] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads, on purpose
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
    "sliding_window": 48,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY["mistral3"] = {
    **dense.TINY["llama"],
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
TINY["qwen2_vl"] = {
    **dense.TINY["qwen2"],
    "model_type": "qwen2_vl_text",
    "head_dim": 16,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}
TINY["qwen3_vl"] = {
    **dense.TINY["qwen3"],
    "model_type": "qwen3_vl_text",
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
}
TINY["qwen3_vl_moe"] = {
    **routed.TINY["qwen3_moe"],
    "model_type": "qwen3_vl_moe_text",
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
}
TINY["muse_glimmer"] = {
    **dense.TINY["llama"],
    "architectures": ["MuseGlimmerForConditionalGeneration"],
    "model_type": "muse_glimmer_text",
    "num_hidden_layers": 5,
    "hidden_activation": "silu",
    "sliding_window": 48,
    "final_logit_softcapping": 5.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.6,
    "post_norm_eps": 1e-8,
}
