"""Stock GGUFs of random Qwen3.5, Qwen3.5-MoE, Qwen3-Next, Granite 4 and LFM2 models: names, layouts and
contents as llama.cpp's converter writes them, and transformers' logits of the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import granite_file
import lfm2_file
import numpy as np
from numpy.typing import NDArray

Tensor = NDArray[np.float32]

OTHERS: dict[str, Any] = {module.ARCHITECTURE: module for module in (granite_file, lfm2_file)}
ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next", *OTHERS)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
N_VOCAB = 256 + len(SPECIAL)
HEAD, N_HEAD, N_KV, D_MODEL, D_FF = 32, 4, 2, 64, 96
K_HEADS, V_HEADS, STATE, CONV = 2, 4, 16, 4
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Hybrid:
    path: Path
    checkpoint: Any  # transformers' model

    def logits(self, tokens: list[int]) -> Tensor:
        import torch

        with torch.no_grad():
            rows = self.checkpoint(torch.tensor([tokens])).logits[0]
        return np.asarray(rows.float().numpy())


def write(
    path: Path, architecture: str = "qwen35", n_layer: int = 4, seed: int = 0, **changes: Any
) -> Hybrid:
    """changes: `given` has keys of the file by name, or None to leave one out; with a `blk.…` name a tensor,
    likewise. `deviation`: of all matrices' numbers."""
    model = random_model(architecture, n_layer, seed, changes.pop("deviation", None))
    keys = stock_keys(architecture, n_layer)
    tensors = stock_tensors(architecture, model)
    for name, value in changes.pop("given", {}).items():
        of = tensors if name.startswith("blk.") else keys
        of.pop(name, None)
        if value is not None:
            of[name] = value
    assert not changes, changes
    write_file(path, architecture, keys, tensors)
    return Hybrid(path, model)


def layer_that_guesses(n_layer: int = 4) -> dict[str, Any]:
    """Keys and tensors of a Qwen3.5's layer for further tokens: the last layer once more, which attends."""
    tensors = stock_tensors("qwen35", random_model("qwen35", n_layer, 0))
    last, own = f"blk.{n_layer - 1}.", f"blk.{n_layer}."
    found: dict[str, Any] = {
        own + name.removeprefix(last): each for name, each in tensors.items() if name.startswith(last)
    }
    random = np.random.default_rng(0)
    found |= {f"{own}nextn.{name}.weight": np.ones(D_MODEL, np.float32) for name in ("enorm", "hnorm")}
    joined = random.standard_normal((D_MODEL, 2 * D_MODEL)) / (2 * D_MODEL) ** 0.5
    found[f"{own}nextn.eh_proj.weight"] = joined.astype(np.float32)
    return found | {"qwen35.block_count": n_layer + 1, "qwen35.nextn_predict_layers": 1}


def random_model(architecture: str, n_layer: int, seed: int, deviation: float | None = None) -> Any:
    import torch
    import transformers

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    if architecture in OTHERS:
        return OTHERS[architecture].random_model(N_VOCAB, n_layer)
    sizes = {
        "vocab_size": N_VOCAB,
        "hidden_size": D_MODEL,
        "num_hidden_layers": n_layer,
        "num_attention_heads": N_HEAD,
        "num_key_value_heads": N_KV,
        "head_dim": HEAD,
        "max_position_embeddings": 4096,
        "linear_conv_kernel_dim": CONV,
        "linear_key_head_dim": STATE,
        "linear_value_head_dim": STATE,
        "linear_num_key_heads": K_HEADS,
        "linear_num_value_heads": V_HEADS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }
    if architecture == "qwen35":
        config = transformers.Qwen3_5TextConfig(**sizes, intermediate_size=D_FF)
        model = transformers.Qwen3_5ForCausalLM(config)
    else:
        sizes |= EXPERTS | {"shared_expert_intermediate_size": 48}
        if architecture == "qwen35moe":
            model = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**sizes))
        else:
            model = transformers.Qwen3NextForCausalLM(
                transformers.Qwen3NextConfig(**sizes, intermediate_size=D_FF)
            )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.normal_(1.0 if "linear_attn" in name else 0.0, 0.1)
            elif weight.ndim > 1 and "conv1d" not in name:
                weight.normal_(0.0, deviation or 1.5 / weight.shape[-1] ** 0.5)
            elif "conv1d" in name:
                weight.normal_(0.0, deviation or 0.7)
            elif name.endswith("dt_bias"):
                weight.normal_(-3.0, 1.0)
    return model.eval().float()


def stock_keys(architecture: str, n_layer: int) -> dict[str, Any]:
    if architecture in OTHERS:
        found: dict[str, Any] = OTHERS[architecture].stock_keys(n_layer)
        return found
    own = {
        "block_count": n_layer,
        "context_length": 4096,
        "embedding_length": D_MODEL,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_KV,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": HEAD // 4,
        "ssm.conv_kernel": CONV,
        "ssm.state_size": STATE,
        "ssm.group_count": K_HEADS,
        "ssm.time_step_rank": V_HEADS,
        "ssm.inner_size": V_HEADS * STATE,
        "full_attention_interval": 4,
    }
    if architecture != "qwen35moe":
        own["feed_forward_length"] = D_FF
    if architecture != "qwen3next":
        own["rope.dimension_sections"] = [2, 1, 1, 0]
    if architecture != "qwen35":
        own |= {
            "expert_count": EXPERTS["num_experts"],
            "expert_used_count": EXPERTS["num_experts_per_tok"],
            "expert_feed_forward_length": EXPERTS["moe_intermediate_size"],
            "expert_shared_feed_forward_length": 48,
        }
    return {f"{architecture}.{name}": value for name, value in own.items()}


def tiled(x: Tensor, head_dim: int) -> Tensor:
    """Rows of V heads, those of one K head together -> the first V head of every K head, then the second …"""
    rows = x.reshape(K_HEADS, V_HEADS // K_HEADS, head_dim, *x.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(0, 1)).reshape(x.shape)


def stock_tensors(architecture: str, model: Any) -> dict[str, Tensor]:
    if architecture in OTHERS:
        found: dict[str, Tensor] = OTHERS[architecture].stock_tensors(model)
        return found
    weights = {name: np.asarray(w.numpy(), np.float32) for name, w in model.state_dict().items()}
    out = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"] + 1,
        "output.weight": weights["lm_head.weight"],
    }
    for il in range(model.config.num_hidden_layers):
        of = {n.removeprefix(p): w for n, w in weights.items() if n.startswith(p := f"model.layers.{il}.")}
        layer = {
            "attn_norm.weight": of["input_layernorm.weight"] + 1,
            "post_attention_norm.weight": of["post_attention_layernorm.weight"] + 1,
        }
        layer |= ffn(of) if architecture == "qwen35" else experts(of)
        if "self_attn.q_proj.weight" in of:
            layer |= {f"attn_{x}.weight": of[f"self_attn.{x}_proj.weight"] for x in "qkv"}
            layer |= {f"attn_{x}_norm.weight": of[f"self_attn.{x}_norm.weight"] + 1 for x in "qk"}
            layer["attn_output.weight"] = of["self_attn.o_proj.weight"]
        else:
            linear = {
                n.removeprefix("linear_attn."): w for n, w in of.items() if n.startswith("linear_attn.")
            }
            layer |= (delta_net_next if architecture == "qwen3next" else delta_net)(linear)
        out |= {f"blk.{il}.{name}": value for name, value in layer.items()}
    return out


def ffn(of: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"ffn_{x}.weight": of[f"mlp.{x}_proj.weight"] for x in ("gate", "up", "down")}


def experts(of: dict[str, Tensor]) -> dict[str, Tensor]:
    both = of["mlp.experts.gate_up_proj"]  # [n_expert, 2 n_ff, d]
    half = both.shape[1] // 2
    return {
        "ffn_gate_inp.weight": of["mlp.gate.weight"],
        "ffn_gate_exps.weight": both[:, :half],
        "ffn_up_exps.weight": both[:, half:],
        "ffn_down_exps.weight": of["mlp.experts.down_proj"],
        "ffn_gate_inp_shexp.weight": of["mlp.shared_expert_gate.weight"].reshape(-1),
        **{f"ffn_{x}_shexp.weight": of[f"mlp.shared_expert.{x}_proj.weight"] for x in ("gate", "up", "down")},
    }


def delta_net(of: dict[str, Tensor]) -> dict[str, Tensor]:
    n_qk = 2 * K_HEADS * STATE
    conv = of["conv1d.weight"].squeeze(1)
    qkv = of["in_proj_qkv.weight"]
    return {
        "attn_qkv.weight": np.concatenate([qkv[:n_qk], tiled(qkv[n_qk:], STATE)]),
        "attn_gate.weight": tiled(of["in_proj_z.weight"], STATE),
        "ssm_conv1d.weight": np.concatenate([conv[:n_qk], tiled(conv[n_qk:], STATE)]),
        "ssm_dt.bias": tiled(of["dt_bias"], 1),
        "ssm_a": tiled(-np.exp(of["A_log"]), 1),
        "ssm_beta.weight": tiled(of["in_proj_b.weight"], 1),
        "ssm_alpha.weight": tiled(of["in_proj_a.weight"], 1),
        "ssm_norm.weight": of["norm.weight"],
        "ssm_out.weight": np.ascontiguousarray(tiled(of["out_proj.weight"].T.copy(), STATE).T),
    }


def delta_net_next(of: dict[str, Tensor]) -> dict[str, Tensor]:
    n_v = V_HEADS // K_HEADS * STATE
    packed = of["in_proj_qkvz.weight"].reshape(K_HEADS, 2 * STATE + 2 * n_v, -1)
    q, k, v, z = (
        part.reshape(-1, D_MODEL) for part in np.split(packed, [STATE, 2 * STATE, 2 * STATE + n_v], 1)
    )
    return {
        "attn_qkv.weight": np.concatenate([q, k, v]),
        "attn_gate.weight": z,
        "ssm_conv1d.weight": of["conv1d.weight"].squeeze(1),
        "ssm_dt.bias": of["dt_bias"],
        "ssm_a": -np.exp(of["A_log"]),
        "ssm_ba.weight": of["in_proj_ba.weight"],
        "ssm_norm.weight": of["norm.weight"],
        "ssm_out.weight": of["out_proj.weight"],
    }


def byte_tokens() -> list[str]:
    """GPT-2's printable characters of the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(others)) for b in range(256)]


def write_file(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    import gguf

    tokens = [*byte_tokens(), *SPECIAL]
    keys = keys | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(SPECIAL),
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.chat_template": TEMPLATE,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in keys.items():
        writer.add_key_value(name, value, kind_of(value))
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kind_of(value: Any) -> Any:
    import gguf

    if isinstance(value, int) and not isinstance(value, bool):
        return gguf.GGUFValueType.UINT32
    return gguf.GGUFValueType.get_type(value)
