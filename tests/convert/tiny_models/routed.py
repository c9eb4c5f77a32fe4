"""With experts in every layer or most."""

from __future__ import annotations

from typing import Any

from latentkv_convert.source.archs import FULL, LOCAL, layer_types

from . import dense

TINY: dict[str, dict[str, Any]] = {}

TINY["afmoe"] = {
    **dense.TINY["llama"],
    "architectures": ["AfmoeForCausalLM"],
    "model_type": "afmoe",
    "num_hidden_layers": 5,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 64,
    "num_dense_layers": 1,
    "route_scale": 2.5,
    "sliding_window": 48,
    "global_attn_every_n_layers": 4,
    "mup_enabled": True,
}
TINY["bailing_moe_v2"] = {
    **dense.TINY["llama"],
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe_v2",
    "hidden_size": 128,
    "head_dim": 32,  # hidden_size / num_attention_heads: llama.cpp knows no other here
    "partial_rotary_factor": 0.5,
    "num_experts": 8,
    "num_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "use_qk_norm": True,
}
TINY["dots1"] = {
    **dense.TINY["llama"],
    "architectures": ["Dots1ForCausalLM"],
    "model_type": "dots1",
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
TINY["glm4_moe"] = {
    **dense.TINY["llama"],
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
TINY["gpt_oss"] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads, on purpose
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 48,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY["hunyuan_v1_moe"] = {
    **dense.TINY["hunyuan_v1_dense"],
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "model_type": "hunyuan_v1_moe",
    "intermediate_size": 64,
    "num_experts": 6,
    "moe_topk": [3, 3, 3],
    "moe_intermediate_size": [64, 64, 64],
}
TINY["laguna"] = {
    **dense.TINY["llama"],
    "architectures": ["LagunaForCausalLM"],
    "model_type": "laguna",
    "num_hidden_layers": 5,
    "num_attention_heads_per_layer": [4, 6, 6, 6, 4],
    "gating": "per-head",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 48,
    "moe_routed_scaling_factor": 2.5,
    "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    "sliding_window": 48,
    "layer_types": layer_types([False, True, True, True, False]),
    "rms_norm_eps": 1e-6,
    "rope_theta": None,
    "rope_parameters": {
        FULL: {
            "rope_type": "yarn",
            "rope_theta": 500000.0,
            "partial_rotary_factor": 0.5,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 64.0,
            "beta_slow": 1.0,
        },
        LOCAL: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}
TINY["minimax_m2"] = {
    **dense.TINY["llama"],
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "rotary_dim": 16,
}
TINY["qwen3_moe"] = {
    **dense.TINY["qwen3"],
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
TINY["ernie4_5_moe"] = {
    **dense.TINY["ernie4_5"],
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "hidden_size": 128,
    "head_dim": 32,  # hidden_size / num_attention_heads: transformers knows no other here
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 64,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
TINY["exaone_moe"] = {
    **dense.TINY["llama"],
    "architectures": ["ExaoneMoeForCausalLM"],
    "model_type": "exaone_moe",
    "num_hidden_layers": 4,
    "sliding_window": 48,
    "sliding_window_pattern": 4,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 1,
}
TINY["kolibri1"] = {
    **dense.TINY["llama"],
    "architectures": ["Kolibri1ForCausalLM"],
    "model_type": "kolibri1",
    "num_hidden_layers": 5,
    "sliding_window": 48,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": False,
    "pad_token_id": 1,
}
del TINY["kolibri1"]["intermediate_size"]
