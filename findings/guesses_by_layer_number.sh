#!/usr/bin/env bash
# transformers 5.24.0 finds a checkpoint's layer for further tokens by a number in its code, not by the config: of glm4_moe those of 46 and 92
# layers, the sizes that were released. `generate(use_mtp=True)` says that weights are missing from a model of 45 layers whose checkpoint has them
# under the names that config.json implies; of 46 layers, with weights made alike, it generates what it generates without.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; "$folder/venv/bin/pip" install -q transformers==5.24.0 torch==2.13.0
cat > "$folder/ask.py" <<'PY'
import sys
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM


def checkpoint(folder, n):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "first_k_dense_replace": 1}
    config = Glm4MoeConfig(
        num_hidden_layers=n, num_mtp_layers=1, tie_word_embeddings=False, eos_token_id=None, pad_token_id=0,
        **sizes, **heads, **experts,
    )
    Glm4MoeForCausalLM(config).save_pretrained(folder)
    file = f"{folder}/model.safetensors"
    held, last, own = load_file(file), f"layers.{n - 1}.", f"layers.{n}."
    held |= {name.replace(last, own): each.clone() for name, each in held.items() if last in name}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        held[f"model.{own}{name}.weight"] = torch.ones(32)
    held[f"model.{own}eh_proj.weight"] = torch.randn(32, 64) / 8
    save_file(held, file, metadata={"format": "pt"})


for n, works in ((45, False), (46, True)):
    checkpoint(f"{sys.argv[1]}/{n}", n)
    model = Glm4MoeForCausalLM.from_pretrained(f"{sys.argv[1]}/{n}").eval()
    prompt = torch.arange(1, 17)[None]
    try:
        found = model.generate(prompt, max_new_tokens=16, do_sample=False, use_mtp=True)
        said = "generated"
        assert torch.equal(found, model.generate(prompt, max_new_tokens=16, do_sample=False))
    except RuntimeError as error:
        said = str(error).splitlines()[0][:60]
    print(f"{n} layers: {said}")
    assert said.startswith("generated" if works else "The following MtpModel weights are missing")
PY
"$folder/venv/bin/python" "$folder/ask.py" "$folder" 2> "$folder/log" || { tail -3 "$folder/log"; exit 1; }
