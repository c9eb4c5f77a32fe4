"""A random LFM2 whose layers are short convolutions, but for some that attend: its keys and tensors as
llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensor = NDArray[np.float32]

ARCHITECTURE = "lfm2"
N_HEAD, N_KV, D_MODEL, D_FF, CONV = 4, 2, 128, 96, 3
FFN = {"gate": "w1", "up": "w3", "down": "w2"}


def random_model(n_vocab: int, n_layer: int) -> Any:
    import torch
    import transformers

    config = transformers.Lfm2Config(
        vocab_size=n_vocab,
        hidden_size=D_MODEL,
        intermediate_size=D_FF,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=n_layer,
        layer_types=[mixer(il) for il in range(n_layer)],
        num_attention_heads=N_HEAD,
        num_key_value_heads=N_KV,
        max_position_embeddings=4096,
        conv_L_cache=CONV,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = transformers.Lfm2ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1.0, 0.1)
            elif weight.ndim > 1:
                weight.normal_(0.0, 0.7 if ".conv.conv" in name else 1.5 / weight.shape[-1] ** 0.5)
    return model.eval().float()


def mixer(il: int) -> str:
    return "full_attention" if (il + 1) % 4 == 0 else "conv"


def stock_keys(n_layer: int) -> dict[str, Any]:
    own = {
        "block_count": n_layer,
        "context_length": 4096,
        "embedding_length": D_MODEL,
        "feed_forward_length": D_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": [N_KV * (mixer(il) == "full_attention") for il in range(n_layer)],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "shortconv.l_cache": CONV,
    }
    return {f"{ARCHITECTURE}.{name}": value for name, value in own.items()}


def stock_tensors(model: Any) -> dict[str, Tensor]:
    weights = {name: np.asarray(w.numpy(), np.float32) for name, w in model.state_dict().items()}
    out = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "token_embd_norm.weight": weights["model.embedding_norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for il in range(model.config.num_hidden_layers):
        of = {n.removeprefix(p): w for n, w in weights.items() if n.startswith(p := f"model.layers.{il}.")}
        layer = {
            "attn_norm.weight": of["operator_norm.weight"],
            "ffn_norm.weight": of["ffn_norm.weight"],
            **{f"ffn_{name}.weight": of[f"feed_forward.{source}.weight"] for name, source in FFN.items()},
        }
        if mixer(il) == "full_attention":
            layer |= {f"attn_{x}.weight": of[f"self_attn.{x}_proj.weight"] for x in "qkv"}
            layer |= {f"attn_{x}_norm.weight": of[f"self_attn.{x}_layernorm.weight"] for x in "qk"}
            layer["attn_output.weight"] = of["self_attn.out_proj.weight"]
        else:
            layer |= {f"shortconv.{x}.weight": of[f"conv.{x}.weight"] for x in ("in_proj", "out_proj")}
            layer["shortconv.conv.weight"] = of["conv.conv.weight"].squeeze(1)
        out |= {f"blk.{il}.{name}": value for name, value in layer.items()}
    return out
