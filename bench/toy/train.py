"""Trains a toy in Qwen 3.5's layout: three gated delta nets to one layer of attention, 10M parameters.

    python bench/toy/train.py --out models/demo-hybrid

Figures of quality need K and V that were trained. --seconds bounds the training (default 200, on a GPU, where
a step is one CUDA graph); `--resume DIR` goes on from a checkpoint, and every minute --out holds the best one
so far. `--device cpu --seconds 20 --batch 2 --texts 40` shows that it runs.

The text is what Python carries, its standard library and language reference, without what
latentkv_convert/calibrate/text/mix.py holds back; this repository; and numbers to be found again, so that
attention has something to do. Tokenizer and chat template are those of models/demo.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

# bench/, and the converter where nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "convert"))

from latentkv_convert.calibrate.text import mix
from toy.forward import CHUNK, logits
from toy.windows import ROOT, STAGES, Stream, retrieval

DEMO = ROOT / "models" / "demo"
MEASURED = 40  # windows
ASKED, TRIALS = (512, 1024, 2048), 20  # tokens, texts of as many
RATE, WARM_UP, DECAY, CLIP = 2e-3, 100, 0.1, 1.0
SAVED = 60  # seconds between checkpoints
LAYOUT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 480,
    "num_hidden_layers": 12,  # of which every fourth attends
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}


class Step:
    """One step of training on `rows` windows: a CUDA graph where the device takes one."""

    def __init__(self, model: Any, stream: Tensor, rate: Tensor, optimizer: Any, shape: tuple[int, int]):
        self.model, self.stream, self.optimizer, self.rate = model, stream, optimizer, rate
        self.begins = torch.zeros(shape[0], dtype=torch.int64, device=stream.device)
        self.within = torch.arange(shape[1], device=stream.device)
        self.loss = torch.zeros((), device=stream.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager = stream.device.type != "cuda"

    def run(self) -> None:
        ids = self.stream[self.begins[:, None] + self.within]
        with torch.autocast(ids.device.type, torch.bfloat16, cache_enabled=False):
            predicted = logits(self.model, ids)
        loss = F.cross_entropy(predicted[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, foreach=True)
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def capture(self) -> None:
        """Warms up on a stream of its own, then captures; without a graph steps are run one by one."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.optimizer.zero_grad(set_to_none=True)
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.run()
            self.graph = graph
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.eager = True
            print(f"no CUDA graph, steps run one by one: {str(error).splitlines()[0]}", flush=True)

    def __call__(self, begins: np.ndarray[Any, Any], rate: float) -> None:
        self.begins.copy_(torch.from_numpy(begins))  # waits for the step before, so that times are true
        self.rate.fill_(rate)
        if self.graph is None and not self.eager:
            self.capture()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.optimizer.zero_grad(set_to_none=True)
            self.run()


def rate(step: int, done: float) -> float:
    """Of the largest; done: 0 to 1."""
    return min(1.0, (step + 1) / WARM_UP) * (0.03 + 0.97 * (1 + math.cos(math.pi * done)) / 2)


def stage_of(done: float) -> int:
    ends = list(itertools.accumulate(share for share, _, _ in STAGES))
    return next((at for at, end in enumerate(ends) if done < end), len(STAGES) - 1)


def optimizer_of(model: Any, learning_rate: Tensor) -> torch.optim.AdamW:
    wide = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": wide, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    on_gpu = learning_rate.device.type == "cuda"
    how = {"fused": True, "capturable": True} if on_gpu else {"foreach": False}
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), **how)


def train(
    model: Any, stream: Stream, options: argparse.Namespace, report: Callable[[int, float, float], None]
) -> int:
    """Steps that the time sufficed for; report: (step, seconds, loss), every --every seconds, at the end."""
    learning_rate = torch.tensor(RATE, device=options.device)
    optimizer = optimizer_of(model, learning_rate)
    ids = torch.from_numpy(stream.ids).to(options.device)
    begin, reported, held, step_of = time.monotonic(), 0.0, -1, None
    for step in itertools.count():
        seconds = time.monotonic() - begin
        if seconds >= options.seconds:
            report(step, seconds, math.nan if step_of is None else step_of.loss.item())
            return step
        stage = stage_of(seconds / options.seconds)
        window = STAGES[stage][1]
        if stage != held or step_of is None:
            held, step_of = stage, None  # the memory of the graph before
            rows = max(1, options.batch * 1024 // window)
            step_of = Step(model, ids, learning_rate, optimizer, (rows, window))
            print(f"step {step}: {rows} windows of {window} tokens, {seconds:.0f} s", flush=True)
        step_of(stream.begins(stage, len(step_of.begins)), RATE * rate(step, seconds / options.seconds))
        if seconds - reported >= options.every:
            report(step, seconds, step_of.loss.item())
            reported = seconds
    raise AssertionError


class Measurement:
    """Perplexity of held-back text, and the share of the tokens of numbers that are found again."""

    def __init__(self, tokenizer: Any, device: str) -> None:
        text = mix.text(
            lambda messages: tokenizer.apply_chat_template(messages, tokenize=False), part=mix.HELD_OUT
        )
        ids = np.array(tokenizer(text)["input_ids"])
        self.windows = torch.from_numpy(ids[: len(ids) // 1024 * 1024].reshape(-1, 1024)[:MEASURED]).to(
            device
        )
        self.asked = {n: retrieval(tokenizer, random.Random(1000), TRIALS, n) for n in ASKED}
        self.digits = {n: digits(tokenizer, rows) for n, rows in self.asked.items()}
        self.device = device

    @torch.no_grad()
    def __call__(self, model: Any) -> dict[str, float]:
        losses = []
        for part in self.windows.split(10):
            predicted = logits(model, part)
            losses.append(F.cross_entropy(predicted[:, :-1].flatten(0, 1), part[:, 1:].flatten()).item())
        found = {"perplexity": math.exp(sum(losses) / len(losses))}
        for n, rows in self.asked.items():
            said = np.concatenate(
                [
                    logits(model, part).argmax(-1).cpu()
                    for part in torch.from_numpy(rows).to(self.device).split(5)
                ]
            )
            right = said[:, :-1] == rows[:, 1:]
            found[f"found again in {n} tokens"] = float(right[self.digits[n][:, 1:]].mean())
        return found


def digits(tokenizer: Any, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[rows, n]: whether a token is of a number that is asked for."""
    found = np.zeros(rows.shape, dtype=bool)
    for row, ids in zip(found, rows, strict=True):
        said = [str(piece) for piece in tokenizer.convert_ids_to_tokens(ids.tolist())]
        colons = list(itertools.accumulate(":" in piece for piece in said))
        for at in range(4, len(said)):
            row[at] = said[at].strip("\u0120").isdigit() and colons[at] > colons[at - 4]
    return found


def compared(model: Any, ids: Tensor) -> float:
    """Largest difference of our logits from transformers', of the largest."""
    with torch.no_grad():
        ours, theirs = logits(model, ids), model(input_ids=ids, use_cache=False).logits
    return float((ours - theirs).abs().max() / theirs.abs().max())


def save(model: Any, out: Path) -> None:
    copy.deepcopy(model).bfloat16().save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(DEMO / name, out / name)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo-hybrid"), help="where the checkpoint goes"
    )
    parser.add_argument("--seconds", type=float, default=200, help="of training (default 200)")
    parser.add_argument("--every", type=float, default=15, help="seconds between measurements (default 15)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="the checkpoint to go on from")
    parser.add_argument("--texts", type=int, metavar="N", help="the first N files alone")
    parser.add_argument("--batch", type=int, default=32, help="windows of 1024 tokens")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    own = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3_5TextConfig(**LAYOUT, **own, bos_token_id=tokenizer.bos_token_id)
    model = (
        Qwen3_5ForCausalLM.from_pretrained(options.resume, dtype=torch.float32)
        if options.resume
        else Qwen3_5ForCausalLM(config)
    )
    model = model.to(options.device).train()
    begin = time.monotonic()
    stream = Stream(tokenizer, options.texts)
    measured = Measurement(tokenizer, options.device)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{n_parameters / 1e6:.1f}M parameters, {stream.n_text / 1e6:.1f}M tokens of text", flush=True)
    print(f"text read in {time.monotonic() - begin:.0f} s", flush=True)
    print(f"logits differ from transformers' by {compared(model, measured.windows[:2, : 4 * CHUNK]):.1e}")
    torch.set_float32_matmul_precision("high")
    best, saved, kept = math.inf, 0.0, None

    def report(step: int, seconds: float, loss: float) -> None:
        nonlocal best, saved, kept
        found = measured(model)
        score = math.log(found["perplexity"]) - sum(found[f"found again in {n} tokens"] for n in ASKED)
        print(f"step {step}: loss {loss:.3f}, {seconds:.0f} s, {json.dumps(found)}", flush=True)
        if score < best:
            best, kept = score, {name: value.clone() for name, value in model.state_dict().items()}
        if seconds - saved >= SAVED and kept is not None:
            saved = seconds
            write(kept)

    def write(state: dict[str, Tensor]) -> None:
        now = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        save(model, options.out)
        model.load_state_dict(now)

    steps = train(model, stream, options, report)
    assert kept is not None
    write(kept)
    model.load_state_dict(kept)
    print(json.dumps({"steps": steps, **measured(model.eval())}))


if __name__ == "__main__":
    main()
