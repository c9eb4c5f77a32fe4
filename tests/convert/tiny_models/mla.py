"""Latent attention of DeepSeek's kind."""

from __future__ import annotations

from typing import Any

TINY: dict[str, dict[str, Any]] = {}

_BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY["deepseek_v2"] = {
    **_BASE,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "topk_method": "greedy",
    "norm_topk_prob": False,
}
TINY["deepseek_v3"] = {
    **_BASE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
}
TINY["glm4_moe_lite"] = {
    **_BASE,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
del TINY["glm4_moe_lite"]["first_k_dense_replace"]
