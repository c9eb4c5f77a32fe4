"""The same tokens through the runtime and through transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import model_class, text_config
from latentkv_convert.calibrate.decoder import Decoder
from latentkv_convert.cli import parse
from latentkv_convert.pipeline import convert
from latentkv_convert.source.checkpoint_source import CheckpointSource

core = pytest.importorskip("latentkv._core", reason="needs the native module (pip install .)")

N = 200  # tokens of a test's sequence
N_CTX = 256


def run(checkpoint: Path, output: Path, *options: str) -> Any:
    """The converted file as a native model, its weights in f32."""
    convert(parse([str(checkpoint), "-o", str(output), "--no-plot", "--outtype", "f32", *options], "test"))
    return core.Model(str(output))


def on_gpu(path: Path) -> Any:
    """The file with all layers on a GPU, which need not exist: the model forecasts and opens no session."""
    return core.Model(str(path), n_gpu_layers=99, describe_only=True)


def load(checkpoint: Path) -> Any:
    config = text_config(json.loads((checkpoint / "config.json").read_text()))
    return (
        model_class(config)
        .from_pretrained(checkpoint, config=config, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )


def logits(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids]), use_cache=False).logits[0].numpy())


def expected_logits(checkpoint: Path, ids: list[int]) -> np.ndarray:
    return logits(load(checkpoint), ids)


def expected_states(checkpoint: Path, ids: list[int]) -> np.ndarray:
    """Hidden states behind the last norm, [n, n_embd]."""
    with torch.no_grad():
        found = load(checkpoint).base_model(torch.tensor([ids]), use_cache=False)
    return np.asarray(found.last_hidden_state[0].numpy())


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    """Relative norm of the difference, in float64. NaN never passes a `<`."""
    assert got.shape == expected.shape
    exact = expected.astype(np.float64)
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def session(model: Any, kv: str = "f32", implementation: str = "fused", n_ctx: int = N_CTX) -> Any:
    return core.Session(model, n_ctx=n_ctx, n_threads=1, kv=kv, implementation=implementation)


def step_by_step(model: Any, ids: list[int], prompt: int) -> np.ndarray:
    """[len(ids) - prompt + 1, n_vocab]: the prompt's last logits, then one decoded token at a time."""
    live = session(model)
    rows = [live.decode(ids[:prompt])]
    rows += [live.decode([token]) for token in ids[prompt:]]
    return np.concatenate(rows)


def token_ids(n: int = N) -> list[int]:
    return [int(i) for i in np.random.default_rng(7).integers(2, 320, n)]


def equals_transformers(checkpoint: Path, path: Path) -> None:
    """The streamed decoder, and a plain file that is written to path: whole, by the stock expression, in
    steps and in pieces."""
    ids = token_ids()
    expected = expected_logits(checkpoint, ids)
    with torch.no_grad():
        streamed = Decoder(CheckpointSource(checkpoint))(torch.tensor([ids]))[0].numpy()
    assert distance(streamed, expected) < 2e-5
    model = run(checkpoint, path, "--method", "none")
    assert distance(session(model).decode(ids, output="all"), expected) < 1e-4
    assert distance(session(model, implementation="reference").decode(ids, output="all"), expected) < 1e-4
    assert distance(step_by_step(model, ids, N - 20), expected[N - 21 :]) < 1e-4
    live = session(model)
    chunks = [live.decode(ids[begin : begin + 50], output="all") for begin in range(0, N, 50)]
    assert distance(np.concatenate(chunks), expected) < 1e-4
