"""Trains a toy in Qwen 3.5's layout: three gated delta nets to one layer of attention, 12M parameters.

    python bench/hybrid_toy.py --out models/demo-hybrid

Figures of quality need K and V that were trained. Some minutes on a GPU; `--device cpu --steps 2 --batch 2`
shows that it runs.

The text is what Python carries: its standard library and language reference, without what
latentkv_convert/calibrate/text/mix.py holds back, the packages that are installed, and numbers to be found
again, so that attention has something to do. Tokenizer and chat template are those of models/demo.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from latentkv_convert.calibrate.text import mix

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo"
WINDOWS = ((0.8, 1024), (0.2, 2048))  # share of the steps, tokens of a window
PACKAGES = 80_000_000  # characters
ASKED, TRIALS = (500, 1000, 2000), 20  # tokens, texts of as many
RETRIEVAL = 0.3  # of the windows
RATE, WARM_UP, DECAY, CLIP = 2e-3, 100, 0.1, 1.0
LAYOUT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
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


def texts() -> Iterator[str]:
    """Chapters and modules that nothing is measured on, and packages up to PACKAGES characters."""
    held_out = set(mix.MODULES[True].split())
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        name = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        if name not in held_out and not {"test", "tests", "site-packages", "idlelib"} & set(path.parts):
            yield path.read_text(encoding="utf-8", errors="ignore")
    yield from mix.chapters(held_out=False) * 4  # prose is a small part of all
    installed = Path(torch.__file__).parents[1]
    paths = [path for end in ("py", "md", "rst") for path in installed.rglob(f"*.{end}")]
    left = PACKAGES
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        text = path.read_text(encoding="utf-8", errors="ignore")[:20_000]
        left -= len(text)
        if left < 0:
            return
        yield text


def encoded(tokenizer: Any) -> NDArray[np.int64]:
    end = [tokenizer.eos_token_id]
    return np.concatenate([np.array(tokenizer(text)["input_ids"] + end) for text in texts()])


def retrieval(tokenizer: Any, rng: random.Random, n: int) -> list[int]:
    """n tokens: facts with numbers, then the same numbers asked for in another order, and again."""
    ids: list[int] = []
    while len(ids) < n:
        names = rng.sample(
            [f"{side} {place}" for side in mix.SIDES for place in mix.PLACES], rng.randint(3, 12)
        )
        numbers = {name: str(rng.randrange(10_000, 10_000_000)) for name in names}
        lines = [f"The number of the {name} is {number}." for name, number in numbers.items()]
        asked = rng.sample(names, len(names))
        answers = [f"The number of the {name}: {numbers[name]}" for name in asked]
        ids += tokenizer("\n".join([*lines, "", *answers]))["input_ids"] + [tokenizer.eos_token_id]
    return ids[:n]


def batches(corpus: NDArray[np.int64], tokenizer: Any, steps: int, size: int) -> Iterator[NDArray[np.int64]]:
    rng = random.Random(0)
    for share, window in WINDOWS:
        rows = max(1, size * WINDOWS[0][1] // window)
        for _ in range(math.ceil(share * steps)):
            batch = np.empty((rows, window), dtype=np.int64)
            for row in batch:
                begin = rng.randrange(len(corpus) - window)
                row[:] = corpus[begin : begin + window]
                if rng.random() < RETRIEVAL:
                    row[:] = retrieval(tokenizer, rng, window)
            yield batch


def rate(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARM_UP) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


def train(model: Any, corpus: NDArray[np.int64], tokenizer: Any, options: argparse.Namespace) -> None:
    wide = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": wide, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, options.steps))
    begin = time.monotonic()
    for step, batch in enumerate(batches(corpus, tokenizer, options.steps, options.batch)):
        ids = torch.from_numpy(batch).to(options.device)
        with torch.autocast(options.device.split(":")[0], torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - begin:.0f} s", flush=True)


@torch.no_grad()
def measured(model: Any, tokenizer: Any, device: str) -> dict[str, float]:
    """Perplexity of held-back text, and how many tokens of numbers are found again."""
    text = mix.text(lambda messages: tokenizer.apply_chat_template(messages, tokenize=False), held_out=True)
    ids = np.array(tokenizer(text)["input_ids"])
    windows = ids[: len(ids) // 1024 * 1024].reshape(-1, 1024)[:40]
    losses = [
        float(model(t[None], labels=t[None], use_cache=False).loss)
        for t in torch.from_numpy(windows).to(device)
    ]
    found = {"perplexity": math.exp(sum(losses) / len(losses))}
    for n in ASKED:
        hits = []
        for seed in range(TRIALS):
            row = torch.tensor([retrieval(tokenizer, random.Random(1000 + seed), n)], device=device)
            predicted = model(row, use_cache=False).logits[0, :-1].argmax(-1)
            said = [str(piece) for piece in tokenizer.convert_ids_to_tokens(row[0].tolist())]
            asks = list(itertools.accumulate(":" in piece for piece in said))
            digits = [
                at
                for at, piece in enumerate(said)
                if at > 3 and piece.strip("Ġ").isdigit() and asks[at] > asks[at - 4]
            ]
            hits += [bool(predicted[at - 1] == row[0, at]) for at in digits]
        found[f"found again in {n} tokens"] = sum(hits) / max(1, len(hits))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo-hybrid"), help="where the checkpoint goes"
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32, help="windows of 1024 tokens")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    own = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3_5TextConfig(**LAYOUT, **own, bos_token_id=tokenizer.bos_token_id)
    model = Qwen3_5ForCausalLM(config).to(options.device)
    corpus = encoded(tokenizer)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{n_parameters / 1e6:.1f}M parameters, {len(corpus) / 1e6:.1f}M tokens of text", flush=True)
    train(model.train(), corpus, tokenizer, options)
    found = measured(model.eval(), tokenizer, options.device)
    print(json.dumps(found))
    model.bfloat16().save_pretrained(options.out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(DEMO / name, options.out / name)


if __name__ == "__main__":
    sys.exit(main())
