"""Trains a toy in Qwen 3.5's layout: three gated delta nets to one layer of attention, 10M parameters.

    python bench/hybrid_toy.py --out models/demo-hybrid

Figures of quality need K and V that were trained. --seconds bounds the training (default 200, on a GPU);
`--device cpu --seconds 20 --batch 2 --texts 40` shows that it runs.

The text is what Python carries, its standard library and language reference, without what
latentkv_convert/calibrate/text/mix.py holds back; this repository; and numbers to be found again, so that
attention has something to do. Tokenizer and chat template are those of models/demo.
"""

from __future__ import annotations

import argparse
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

# where nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "convert"))

from latentkv_convert.calibrate.text import mix

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo"
WINDOWS = ((0.8, 1024), (0.2, 2048))  # share of the time, tokens of a window
LONGEST = 60_000  # characters of one file
POOL = 4000  # windows of numbers
ENDS = ("py", "md", "cpp", "h", "cu", "cuh")
MEASURED = 40  # windows
ASKED, TRIALS = (500, 1000, 2000), 20  # tokens, texts of as many
RETRIEVAL = 0.3  # of the windows
RATE, WARM_UP, DECAY, CLIP = 2e-3, 100, 0.1, 1.0
Tokens = NDArray[np.int64]
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


def texts() -> Iterator[str]:
    """Modules and chapters that nothing is measured on, and this repository."""
    held_out = set(mix.MODULES[True].split())
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        name = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        if name not in held_out and not {"site-packages", "idlelib"} & set(path.parts):
            yield path.read_text(encoding="utf-8", errors="ignore")[:LONGEST]
    yield from mix.chapters(held_out=False) * 4  # prose is a small part of all
    for folder, end in itertools.product(("bench", "docs", "native", "python", "tests", "tools"), ENDS):
        for path in sorted((ROOT / folder).rglob(f"*.{end}")):
            yield path.read_text(encoding="utf-8", errors="ignore")[:LONGEST]


def encoded(tokenizer: Any, n_texts: int | None) -> Tokens:
    ids = tokenizer(list(itertools.islice(texts(), n_texts)))["input_ids"]
    return np.concatenate([np.array([*each, tokenizer.eos_token_id]) for each in ids])


def asked(rng: random.Random) -> str:
    """Facts with numbers, then the same numbers asked for in another order."""
    names = rng.sample([f"{side} {place}" for side in mix.SIDES for place in mix.PLACES], rng.randint(3, 12))
    numbers = {name: str(rng.randrange(10_000, 10_000_000)) for name in names}
    lines = [f"The number of the {name} is {number}." for name, number in numbers.items()]
    answers = [f"The number of the {name}: {numbers[name]}" for name in rng.sample(names, len(names))]
    return "\n".join([*lines, "", *answers])


def retrieval(tokenizer: Any, rng: random.Random, rows: int, n: int) -> Tokens:
    """[rows, n]: one question after another, from the beginning of one."""
    found = np.empty((rows, n), dtype=np.int64)
    for row in found:
        ids: list[int] = []
        while len(ids) < n:
            for each in tokenizer([asked(rng) for _ in range(8)])["input_ids"]:
                ids += [*each, tokenizer.eos_token_id]
        row[:] = ids[:n]
    return found


def batch(corpus: Tokens, pool: Tokens, rng: random.Random, rows: int, window: int) -> Tokens:
    made = np.empty((rows, window), dtype=np.int64)
    for row in made:
        begin = rng.randrange(len(corpus) - window)
        row[:] = corpus[begin : begin + window]
        if rng.random() < RETRIEVAL:
            row[:] = pool[rng.randrange(len(pool)), :window]
    return made


def rate(step: int, done: float) -> float:
    """Of the largest; done: 0 to 1."""
    return min(1.0, (step + 1) / WARM_UP) * (0.03 + 0.97 * (1 + math.cos(math.pi * done)) / 2)


def train(model: Any, corpus: Tokens, pool: Tokens, options: argparse.Namespace) -> int:
    """Steps that the time sufficed for."""
    wide = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": wide, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=options.device != "cpu")
    rng = random.Random(0)
    begin = time.monotonic()
    for step in itertools.count():
        done = (time.monotonic() - begin) / options.seconds
        if done >= 1:
            return step
        window = WINDOWS[0][1] if done < WINDOWS[0][0] else WINDOWS[1][1]
        rows = max(1, options.batch * WINDOWS[0][1] // window)
        ids = torch.from_numpy(batch(corpus, pool, rng, rows, window)).to(options.device)
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate(step, done)
        with torch.autocast(options.device.split(":")[0], torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:  # also waits for the GPU, so that the time is true
            print(f"step {step}: loss {loss.item():.3f}, {done * options.seconds:.0f} s", flush=True)
    raise AssertionError


@torch.no_grad()
def measured(model: Any, tokenizer: Any, device: str) -> dict[str, float]:
    """Perplexity of held-back text, and the share of the tokens of numbers that are found again."""
    text = mix.text(lambda messages: tokenizer.apply_chat_template(messages, tokenize=False), held_out=True)
    ids = np.array(tokenizer(text)["input_ids"])
    windows = ids[: len(ids) // 1024 * 1024].reshape(-1, 1024)[:MEASURED]
    losses = [
        float(model(t[None], labels=t[None], use_cache=False).loss)
        for t in torch.from_numpy(windows).to(device)
    ]
    found = {"perplexity": math.exp(sum(losses) / len(losses))}
    for n in ASKED:
        rows = torch.from_numpy(retrieval(tokenizer, random.Random(1000), TRIALS, n)).to(device)
        hits = []
        for row in rows:
            predicted = model(row[None], use_cache=False).logits[0, :-1].argmax(-1)
            said = [str(piece) for piece in tokenizer.convert_ids_to_tokens(row.tolist())]
            colons = list(itertools.accumulate(":" in piece for piece in said))
            digits = [
                at
                for at, piece in enumerate(said)
                if at > 3 and piece.strip("\u0120").isdigit() and colons[at] > colons[at - 4]
            ]
            hits += [bool(predicted[at - 1] == row[at]) for at in digits]
        found[f"found again in {n} tokens"] = sum(hits) / max(1, len(hits))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo-hybrid"), help="where the checkpoint goes"
    )
    parser.add_argument("--seconds", type=float, default=200, help="of training (default 200)")
    parser.add_argument("--texts", type=int, metavar="N", help="the first N files alone")
    parser.add_argument("--batch", type=int, default=32, help="windows of 1024 tokens")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    own = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3_5TextConfig(**LAYOUT, **own, bos_token_id=tokenizer.bos_token_id)
    model = Qwen3_5ForCausalLM(config).to(options.device)
    begin = time.monotonic()
    corpus = encoded(tokenizer, options.texts)
    pool = retrieval(tokenizer, random.Random(0), POOL if options.texts is None else 8, WINDOWS[-1][1])
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{n_parameters / 1e6:.1f}M parameters, {len(corpus) / 1e6:.1f}M tokens of text", flush=True)
    print(f"text read in {time.monotonic() - begin:.0f} s", flush=True)
    steps = train(model.train(), corpus, pool, options)
    found = measured(model.eval(), tokenizer, options.device)
    print(json.dumps({"steps": steps, **found}))
    model.bfloat16().save_pretrained(options.out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(DEMO / name, options.out / name)


if __name__ == "__main__":
    sys.exit(main())
