"""Without experts, one kind of layer."""

from __future__ import annotations

from typing import Any

from latentkv_convert.source.archs import FULL, layer_types

TINY: dict[str, dict[str, Any]] = {}

TINY["llama"] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads, on purpose
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY["gemma3_text"] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads, on purpose
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "query_pre_attn_scalar": 32,
    "sliding_window": 48,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY["qwen2"] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY["olmo2"] = {
    **TINY["llama"],
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 1,
}
TINY["apertus"] = {
    **TINY["llama"],
    "architectures": ["ApertusForCausalLM"],
    "model_type": "apertus",
    "hidden_size": 128,
    "head_dim": 32,  # hidden_size / num_attention_heads: transformers knows no other here
    "hidden_act": "xielu",
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "pad_token_id": 1,
}
TINY["ernie4_5"] = {
    **TINY["llama"],
    "architectures": ["Ernie4_5ForCausalLM"],
    "model_type": "ernie4_5",
    "use_bias": False,
    "tie_word_embeddings": True,
    "pad_token_id": 1,
}
TINY["exaone4"] = {
    **TINY["llama"],
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "hidden_size": 128,
    "head_dim": 32,  # hidden_size / num_attention_heads: llama.cpp knows no other here
    "num_hidden_layers": 4,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "layer_types": [FULL] * 4,
    "pad_token_id": 1,
}
TINY["falcon"] = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "bias": False,
    "alibi": False,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_THEIRS = ("rope_scaling", "rope_local_base_freq", "layer_types")
TINY["gemma2"] = {
    **{field: value for field, value in TINY["gemma3_text"].items() if field not in _THEIRS},
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "rope_theta": 10000.0,
    "attn_logit_softcapping": 3.0,  # low enough that scores reach it
    "final_logit_softcapping": 5.0,
}
TINY["glm4"] = {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads, on purpose
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
TINY["granite"] = {
    **TINY["llama"],
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "hidden_size": 128,
    "head_dim": 32,  # hidden_size / num_attention_heads: transformers knows no other here
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.15,  # not 1/sqrt(head_dim), on purpose
    "residual_multiplier": 0.7,
    "logits_scaling": 4.0,
    "tie_word_embeddings": True,
}
TINY["hunyuan_v1_dense"] = {
    **TINY["llama"],
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "model_type": "hunyuan_v1_dense",
    "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
}
TINY["mistral"] = {
    **TINY["llama"],
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 48,
}
TINY["mpt"] = {
    "architectures": ["MptForCausalLM"],
    "model_type": "mpt",
    "vocab_size": 320,
    "d_model": 96,
    "n_heads": 3,  # not a power of two, on purpose
    "n_layers": 2,
    "expansion_ratio": 4,
    "max_seq_len": 512,
    "layer_norm_epsilon": 1e-5,
    "no_bias": True,
    "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None},
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY["olmo3"] = {
    **TINY["olmo2"],
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "num_hidden_layers": 5,
    "sliding_window": 48,
    "layer_types": layer_types([True, True, True, False, True]),
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.2,
    },
}
TINY["opt"] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 320,
    "hidden_size": 96,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "activation_function": "relu",
    "max_position_embeddings": 512,
    "do_layer_norm_before": True,
    "word_embed_proj_dim": 96,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
TINY["phi3"] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(16)],
        "long_factor": [1.0 + 0.6 * i for i in range(16)],
    },
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
TINY["qwen3"] = {
    **TINY["qwen2"],
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "head_dim": 32,  # not hidden_size / num_attention_heads, on purpose
    "attention_bias": False,
    "tie_word_embeddings": False,
}
TINY["seed_oss"] = {
    **TINY["llama"],
    "architectures": ["SeedOssForCausalLM"],
    "model_type": "seed_oss",
    "attention_bias": True,
    "attention_out_bias": False,
    "residual_dropout": 0.0,
}
TINY["smollm3"] = {
    **TINY["llama"],
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "head_dim": 32,  # hidden_size / num_attention_heads: transformers knows no other here
    "pad_token_id": 1,
    "tie_word_embeddings": True,
}
TINY["granite_swa"] = {
    **TINY["granite"],
    "architectures": ["GraniteSWAForCausalLM"],
    "model_type": "granite_swa",
    "num_hidden_layers": 4,
    "sliding_window": 48,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "layer_rope_theta": [0, 10000.0, 10000.0, 10000.0],
    "rope_theta": 10000.0,
}
TINY["apertus1p5"] = {
    **TINY["apertus"],
    "architectures": ["Apertus1p5TextForCausalLM"],
    "model_type": "apertus1p5_text",
    "vocab_size": 352,
    "output_vocab_size": 320,
}
