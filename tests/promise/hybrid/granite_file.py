"""A random Granite 4 whose layers are Mamba-2, but for some that attend: its keys and tensors as llama.cpp's
converter writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensor = NDArray[np.float32]

ARCHITECTURE = "granitehybrid"
N_HEAD, N_KV, D_MODEL, D_FF = 4, 2, 128, 96
HEADS, WIDTH, STATE, GROUPS, CONV = 8, 32, 16, 2, 4
SCALES = {"embedding": 3.0, "attention": 0.15, "residual": 0.7, "logits": 4.0}


def random_model(n_vocab: int, n_layer: int) -> Any:
    import torch
    import transformers

    config = transformers.GraniteMoeHybridConfig(
        vocab_size=n_vocab,
        hidden_size=D_MODEL,
        intermediate_size=D_FF,
        shared_intermediate_size=D_FF,
        num_local_experts=0,
        num_hidden_layers=n_layer,
        layer_types=[mixer(il) for il in range(n_layer)],
        num_attention_heads=N_HEAD,
        num_key_value_heads=N_KV,
        max_position_embeddings=4096,
        embedding_multiplier=SCALES["embedding"],
        attention_multiplier=SCALES["attention"],
        residual_multiplier=SCALES["residual"],
        logits_scaling=SCALES["logits"],
        mamba_n_heads=HEADS,
        mamba_d_head=WIDTH,
        mamba_n_groups=GROUPS,
        mamba_d_state=STATE,
        mamba_d_conv=CONV,
        mamba_chunk_size=32,
    )
    model = transformers.GraniteMoeHybridForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.normal_(1.0, 0.1)
            elif "conv1d" in name:
                weight.normal_(0.0, 0.5)
            elif weight.ndim > 1:
                weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
            elif name.endswith("dt_bias"):
                weight.normal_(-3.0, 1.0)
    return model.eval().float()


def mixer(il: int) -> str:
    return "full_attention" if (il + 1) % 4 == 0 else "linear_attention"


def stock_keys(n_layer: int) -> dict[str, Any]:
    own = {
        "block_count": n_layer,
        "context_length": 4096,
        "embedding_length": D_MODEL,
        "feed_forward_length": D_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": [N_KV * (mixer(il) == "full_attention") for il in range(n_layer)],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.scale": SCALES["attention"],
        "embedding_scale": SCALES["embedding"],
        "residual_scale": SCALES["residual"],
        "logit_scale": SCALES["logits"],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": CONV,
        "ssm.state_size": STATE,
        "ssm.group_count": GROUPS,
        "ssm.time_step_rank": HEADS,
        "ssm.inner_size": HEADS * WIDTH,
    }
    return {f"{ARCHITECTURE}.{name}": value for name, value in own.items()}


def stock_tensors(model: Any) -> dict[str, Tensor]:
    weights = {name: np.asarray(w.numpy(), np.float32) for name, w in model.state_dict().items()}
    out = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for il in range(model.config.num_hidden_layers):
        of = {n.removeprefix(p): w for n, w in weights.items() if n.startswith(p := f"model.layers.{il}.")}
        gate_up = of["shared_mlp.input_linear.weight"]
        layer = {
            "attn_norm.weight": of["input_layernorm.weight"],
            "ffn_norm.weight": of["post_attention_layernorm.weight"],
            "ffn_gate.weight": gate_up[:D_FF],
            "ffn_up.weight": gate_up[D_FF:],
            "ffn_down.weight": of["shared_mlp.output_linear.weight"],
        }
        if mixer(il) == "full_attention":
            names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
            layer |= {f"{to}.weight": of[f"self_attn.{x}_proj.weight"] for x, to in names.items()}
        else:
            layer |= {
                "ssm_in.weight": of["mamba.in_proj.weight"],
                "ssm_conv1d.weight": of["mamba.conv1d.weight"].squeeze(1),
                "ssm_conv1d.bias": of["mamba.conv1d.bias"],
                "ssm_dt.bias": of["mamba.dt_bias"],
                "ssm_a": -np.exp(of["mamba.A_log"])[:, None],
                "ssm_d": of["mamba.D"][:, None],
                "ssm_norm.weight": of["mamba.norm.weight"].reshape(GROUPS, -1),
                "ssm_out.weight": of["mamba.out_proj.weight"],
            }
        out |= {f"blk.{il}.{name}": value for name, value in layer.items()}
    return out
