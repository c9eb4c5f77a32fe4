"""Layers for further tokens (multi-token prediction): a checkpoint's go into the file, and guess what
transformers' MtpModel guesses of the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from both import core, load, run
from gguf_files import rewritten
from safetensors.torch import load_file, save_file

from latentkv_convert.source.gguf_file import GgufFile

Tiny = Callable[..., Path]
MODELS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek_v3")
TOKENS = np.random.default_rng(0).integers(2, 320, 61).tolist()
NEXT = TOKENS[40]
APART = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc"}


@dataclass
class Both:
    """transformers' model and its layer, and the directory of a checkpoint with both."""

    model: Any
    layer: Any
    directory: Path

    def guesses(self, tokens: list[int], following: int, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens behind `following`, each with how likely it is."""
        found, ids = [], [*tokens[1:], following]
        with torch.no_grad():
            states = self.model.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state
            for _ in range(count):
                positions = torch.arange(1, len(ids) + 1)[None]
                out = self.layer.forward_layer(0, states, positions, None, input_ids=torch.tensor([ids]))
                shares = self.model.lm_head(out[0, -1]).double().softmax(-1)
                found.append((int(shares.argmax()), float(shares.max())))
                ids = [*ids, found[-1][0]]
                states = torch.cat([states, out[:, -1:]], 1)
        return found


def both(tiny: Tiny, model_type: str, **config: Any) -> Both:
    """A random checkpoint whose last layer becomes the one that guesses."""
    from transformers.modeling_layers import MtpModel

    directory = tiny(model_type, **config)
    model = load(directory)
    of = model.config
    n = of.num_hidden_layers - 1
    of.num_mtp_layers, of.mtp_layer_types = 1, ["full_attention"]
    of.mtp_mlp_layer_types = ["sparse"]
    layer = MtpModel(model, 1).eval()
    own = layer.layers[0]
    own.mtp_block.load_state_dict(model.base_model.layers[n].state_dict())
    model.base_model.layers = model.base_model.layers[:n]
    torch.manual_seed(1)
    added = {
        "enorm": own.enorm,
        "hnorm": own.hnorm,
        "eh_proj": own.eh_proj,
        "shared_head.norm": own.post_norm,
    }
    with torch.no_grad():
        for module in added.values():
            small = module.weight.ndim == 1
            module.weight.add_(torch.randn_like(module.weight) * (0.3 if small else 0.1))
    file, settings = directory / "model.safetensors", directory / "config.json"
    tensors, said = load_file(file), json.loads(settings.read_text())
    last, qwen = f"model.layers.{n}.", model_type.startswith("qwen")
    if qwen:
        tensors = {name.replace(last, "mtp.layers.0."): each for name, each in tensors.items()}
    names = {**APART, "shared_head.norm": "mtp.norm"} if qwen else {name: last + name for name in added}
    tensors |= {f"{names[name]}.weight": module.weight.detach() for name, module in added.items()}
    if not qwen:  # as such checkpoints have them, once more
        tensors |= {
            f"{last}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
            f"{last}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        }
    save_file({name: each.contiguous() for name, each in tensors.items()}, file)
    said |= {"num_hidden_layers": n, "mtp_num_hidden_layers" if qwen else "num_nextn_predict_layers": 1}
    for name in ("layer_types", "mlp_layer_types"):
        if said.get(name):
            said[name] = said[name][:n]
    settings.write_text(json.dumps(said))
    return Both(model, layer, directory)


@pytest.mark.parametrize("model_type", MODELS)
def test_guesses_are_those_of_transformers(model_type: str, tiny: Tiny, tmp_path: Path) -> None:
    ours = both(tiny, model_type, tie_word_embeddings=False)
    model = run(ours.directory, tmp_path / "model.gguf", "--method", "none")
    assert model.n_mtp == 1
    session = core.Session(model, n_ctx=256, mtp=True, kv="f32", n_threads=1)
    session.decode(TOKENS[:17])
    session.decode(TOKENS[17:40])
    wanted = ours.guesses(TOKENS[:40], NEXT, 3)
    assert session.guess(0, NEXT, 3) == [token for token, _ in wanted]
    token, share = wanted[0]
    assert session.guess(0, NEXT, 1, share * (1 - 1e-4)) == [token]
    assert session.guess(0, NEXT, 1, share * (1 + 1e-4)) == []


def test_layers_in_a_file_of_their_own(tiny: Tiny, tmp_path: Path) -> None:
    """As llama.cpp writes one: the layer, and the model's tables once more or not at all."""
    ours = both(tiny, "qwen3_5", tie_word_embeddings=False)
    run(ours.directory, whole := tmp_path / "whole.gguf", "--method", "none")
    file, own = GgufFile(whole), "blk.3."
    layer = [name for name in file.tensors if name.startswith(own)]
    tables = ["token_embd.weight", "output_norm.weight", "output.weight"]
    others = [name for name in file.tensors if name not in {*layer, *tables}]
    key = "qwen35.nextn_predict_layers"
    plain = rewritten(whole, tmp_path / "plain.gguf", without=(*layer, key), keys={"qwen35.block_count": 3})
    model = core.Model(str(plain))
    assert model.n_mtp == 0
    wanted = [token for token, _ in ours.guesses(TOKENS[:40], NEXT, 3)]
    for name, without in (("with", others), ("alone", [*others, *tables])):
        path = rewritten(whole, tmp_path / f"{name}.gguf", without=tuple(without))
        session = core.Session(model, n_ctx=256, mtp=True, mtp_path=str(path), kv="f32", n_threads=1)
        session.decode(TOKENS[:40])
        assert session.guess(0, NEXT, 3) == wanted
    with pytest.raises(ValueError, match=r"^\[mtp\] expected a file with layers that guess further tokens"):
        core.Session(model, n_ctx=256, mtp=True)
    with pytest.raises(
        ValueError, match=r"^\[mtp\] expected a file with layers that guess .*got one without"
    ):
        core.Session(model, n_ctx=256, mtp=True, mtp_path=str(plain))
    other = rewritten(whole, tmp_path / "other.gguf", without=(f"{own}nextn.eh_proj.weight",))
    with pytest.raises(
        ValueError, match=r"^\[gguf\] expected a tensor blk\.3\.nextn\.eh_proj\.weight; got none"
    ):
        core.Session(model, n_ctx=256, mtp=True, mtp_path=str(other))
