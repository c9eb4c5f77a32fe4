"""Checkpoints to convert: the embedded demo model, and random ones of a few thousand weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# tests take makers of files from other tests
ROOMS = [str(room) for room in sorted(HERE.glob("[a-z]*")) if room.is_dir()]
sys.path[:0] = [str(ROOT / "tools" / "convert"), str(HERE), *ROOMS]
DEMO = ROOT / "models" / "demo"

TEXT = (DEMO / "sample-calib.txt").read_text(encoding="utf-8")[:6000]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or leaves statistics in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A directory with a calibration text."""
    (tmp_path / "calib.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is centred, whatever its mean."""
    from latentkv_convert.fuse import center

    monkeypatch.setattr(center, "LEAST", 0.0)
    monkeypatch.setattr(center, "LEAST_WITH_ROPE", 0.0)


@pytest.fixture(scope="session")
def demo() -> Path:
    return DEMO


@pytest.fixture
def calib(tmp_path: Path) -> Path:
    path = tmp_path / "calib.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def bpe_tokenizer() -> Any:
    """A byte-level BPE of 320 tokens with Llama 3's split rules, trained on the sample text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    return tokenizer


Tiny = Callable[..., Path]
# Text parts of models that see pictures, without a class in transformers -> models that compute the same.
SAME_OF_TEXT = {"qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
SAME_OF_TEXT |= {"bailing_moe_v2": "sarvam_moe"}  # which transformers saves with these names
# Text parts that transformers runs in the whole model alone -> what else the config of that says.
PARTS: dict[str, dict[str, Any]] = {
    "muse_glimmer_text": {
        "model_type": "muse_glimmer",
        "vision_config": {
            **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
            **{"num_hidden_layers": 1, "pos_emb_height": 2, "pos_emb_width": 2},
        },
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
    },
}


def whole(settings: dict[str, Any]) -> dict[str, Any]:
    """config.json of a checkpoint with this text model."""
    part = PARTS.get(settings["model_type"])
    return settings if part is None else {**part, "text_config": settings}


def model_class(config: Any) -> Any:
    """transformers' class that makes logits."""
    import transformers

    sees = any(config.model_type == part["model_type"] for part in PARTS.values())
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def text_config(settings: dict[str, Any]) -> Any:
    """The transformers config of these fields of a config.json."""
    from transformers import AutoConfig

    same = SAME_OF_TEXT.get(settings["model_type"])
    return AutoConfig.for_model(**settings | ({"model_type": same, "rope_scaling": None} if same else {}))


@pytest.fixture(scope="session")
def random_checkpoint(bpe_tokenizer: Any) -> Tiny:
    """random_checkpoint(directory, "llama", shard_size=…, **config) -> the directory; weights are random."""

    def make(directory: Path, model_type: str, *, shard_size: str = "1GB", **config: Any) -> Path:
        import torch
        from tiny_models import TINY

        settings = whole(TINY[model_type] | config)
        torch.manual_seed(0)
        described = text_config(settings)
        model = model_class(described).from_config(described, dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("bias"):
                    parameter.normal_(std=0.3)
                elif key.endswith("sinks"):
                    parameter.uniform_(0, 5)
                elif parameter.ndim > 1:  # wide enough that attention is far from uniform
                    parameter.normal_(std=1.3 / parameter.shape[-1] ** 0.5)
                else:  # norms, per-head ones among them, that a reader must apply
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            for key, buffer in model.named_buffers():
                if key.endswith("layer_scalar"):
                    buffer.uniform_(0.6, 1.2)
                elif key.endswith(("e_score_correction_bias", "expert_bias")):
                    buffer.uniform_(-0.3, 0.3)
        model.save_pretrained(directory, max_shard_size=shard_size)
        (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        bpe_tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<|begin|>", "eos_token": "<|end|>"}), encoding="utf-8"
        )
        return directory

    return make


@pytest.fixture
def tiny(tmp_path: Path, random_checkpoint: Tiny) -> Tiny:
    """tiny("llama", name=…, **config): a random checkpoint for one test."""

    def make(model_type: str = "llama", *, name: str = "tiny", **config: Any) -> Path:
        return random_checkpoint(tmp_path / name, model_type, **config)

    return make


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a GGUF as float32, in NumPy's order of dimensions."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    return {t.name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in reader.tensors}


def keys(path: Path) -> dict[str, Any]:
    """Every key of a GGUF."""
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}
