"""What other packages' KV caches lose, take and claim: those that PyPI has, on a real model.

    python bench/peers.py MODEL.gguf [--windows 1] [--only NAME,NAME] [--save NAME]

Every package is installed with its pinned version into a temporary folder, beside the transformers of this
environment, and measured in a process of its own: several install a module of the same name. A prompt passes
through the cache, then tokens of the text are forced one by one, and their next-token distributions compared
with those of DynamicCache (KLD in nats). The weights are the GGUF's, in f32. Bytes are all storages that the
cache holds after a prompt of LENGTH tokens in f16, of f16's. Not part of any test: it needs a package index.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import record
from command import arguments
from inputs import real_models, texts
from latentkv.measure.divergence import concatenate, score, summary
from record import RESULTS, Column, save

LENGTH = 4096  # tokens at which bytes are counted
BEGIN = 20000  # character of the text at which the first window begins
COLUMNS = [
    Column("package", "package"),
    Column("setting", "setting"),
    Column("claim", "claims"),
    Column("runs", "generate()"),
    Column("share", "bytes, of f16", ".0f", "%"),
    Column("kld", "mean KLD", ".4f"),
    Column("kld_p99", "99 %", ".3f"),
    Column("same_top", "same top", ".0f", "%"),
]
Make = Callable[[Any, Any], Any]  # the cache, from a model and its tokenizer


def quanto(**options: Any) -> Make:
    return lambda model, _: _transformers().QuantizedCache("quanto", model.config, **options)


def hqq(**options: Any) -> Make:
    return lambda model, _: _transformers().QuantizedCache("hqq", model.config, **options)


def turbokv(calibrated: bool) -> Make:
    def make(model: Any, tokenizer: Any) -> Any:
        from turboquant import TurboQuantCache

        skipped = TurboQuantCache.calibrate_skip_layers(model, tokenizer) if calibrated else None
        return TurboQuantCache(model.config, nbits=4, device="cpu", skip_layers=skipped)

    return make


def quantcore(values: bool) -> Make:
    def make(model: Any, _: Any) -> Any:
        from turboquant.hf_integration import make_turboquant_cache

        return make_turboquant_cache(model.config, bits=4, compress_values=values, verbose=False)

    return make


def kakeyalattice(q_range: int) -> Make:
    def make(model: Any, _: Any) -> Any:
        from kakeyalattice.hf import KakeyaLatticeCache

        config = model.config
        return KakeyaLatticeCache(
            q_range=q_range,
            num_hidden_layers=config.num_hidden_layers,
            head_dim=head_dim(config),
            device="cpu",
        )

    return make


def tiny_turboquant(model: Any, _: Any) -> Any:
    from tiny_turboquant import TinyKVCache

    return TinyKVCache(compression="safe")


def dynamic(model: Any, _: Any) -> Any:
    return _transformers().DynamicCache(config=model.config)


def _transformers() -> Any:
    import transformers

    return transformers


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True)
class Peer:
    """A row. packages: with versions; empty: it is transformers' own."""

    package: str
    setting: str
    claim: str
    packages: tuple[str, ...]
    make: Make


QUANTO = ("optimum-quanto==0.2.7",)
HQQ = ("hqq==0.2.8.post1", "termcolor==3.3.0", "einops==0.8.2", "accelerate==1.15.0")
PEERS = {
    "dynamic": Peer("transformers", "DynamicCache", "", (), dynamic),
    "quanto-4": Peer("transformers, quanto", "4 bits, default", "4 bits", QUANTO, quanto(nbits=4)),
    "quanto-4-axes": Peer(
        "transformers, quanto", "4 bits, axes -1", "", QUANTO, quanto(nbits=4, axis_key=-1, axis_value=-1)
    ),
    "quanto-2": Peer("transformers, quanto", "2 bits, default", "2 bits", QUANTO, quanto(nbits=2)),
    "hqq-4": Peer("transformers, hqq", "4 bits, default", "4 bits", HQQ, hqq(nbits=4)),
    "hqq-4-axes": Peer(
        "transformers, hqq", "4 bits, axes 1, its guide's", "", HQQ, hqq(nbits=4, axis_key=1, axis_value=1)
    ),
    "turbokv": Peer("turbokv 0.1.0", "4 bits", "4 to 7 x", ("turbokv==0.1.0",), turbokv(False)),
    "turbokv-layers": Peer("turbokv 0.1.0", "4 bits, layers chosen", "", ("turbokv==0.1.0",), turbokv(True)),
    "quantcore": Peer(
        "quantcore-ai 0.4.2", "4 bits, keys", "3 to 7 x", ("quantcore-ai==0.4.2",), quantcore(False)
    ),
    "quantcore-values": Peer(
        "quantcore-ai 0.4.2", "4 bits, keys and values", "", ("quantcore-ai==0.4.2",), quantcore(True)
    ),
    "kakeyalattice": Peer(
        "kakeyalattice 1.5.0", "E8, q 38, default", "2.5 x", ("kakeyalattice==1.5.0",), kakeyalattice(38)
    ),
    "tiny-turboquant": Peer(
        "tiny-turboquant 0.18.0", "safe, default", "3.3 x", ("tiny-turboquant==0.18.0",), tiny_turboquant
    ),
}
OURS = ("q8_0", "q4_0", "small")


def windows(tokens: list[int], args: argparse.Namespace) -> Iterator[list[int]]:
    size = args.prompt + args.tokens + 1
    for i in range(args.windows):
        yield tokens[i * size : (i + 1) * size]


def scores(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Of a reference's logits and a cache's, [n, n_vocab] each."""
    found = [score(logits, reference.argmax(-1), reference) for reference, logits in pairs]
    total = summary(concatenate(found))
    kld = total["kld"]
    return {"kld": kld["mean"], "kld_p99": kld["p99"], "same_top": 100 * total["same_top"]}


def forced(model: Any, cache: Any, window: list[int], n_prompt: int) -> np.ndarray:
    """Logits behind each token after the prompt, [n, n_vocab]."""
    import torch

    found = []
    with torch.inference_mode():
        model(torch.tensor([window[:n_prompt]]), past_key_values=cache, use_cache=True)
        for token in window[n_prompt:-1]:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            found.append(out.logits[0, -1].float().numpy())
    return np.stack(found)


def held_bytes(cache: Any) -> int:
    """Of every storage that can be reached from the cache, each once."""
    import torch

    seen, storages, left = set(), {}, [cache]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | type(sys)) or callable(each):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor) and type(each) in (torch.Tensor, torch.nn.Parameter):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            continue
        left += [other for other in gc.get_referents(each) if not isinstance(other, str | int | float)]
        left += list(getattr(each, "__dict__", {}).values())
    return sum(storages.values())


def filled(cache: Any, config: Any) -> Any:
    """The cache with LENGTH tokens of normal f16 numbers in every layer."""
    import torch

    random = torch.Generator().manual_seed(1)
    shape = (1, config.num_key_value_heads, LENGTH, head_dim(config))
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, generator=random).half() for _ in "kv")
        cache.update(k, v, layer)
    return cache


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the named peers, in this process: they share their packages."""
    import torch
    from transformers import AutoModelForCausalLM, BatchEncoding

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model)

    def tokenizer(*_: Any, **__: Any) -> Any:
        return BatchEncoding({"input_ids": torch.tensor([args.ids[:12]])})

    every = list(windows(args.ids, args))
    references = [forced(model, dynamic(model, tokenizer), window, args.prompt) for window in every]
    for name in args.cell.split(","):
        yield one(PEERS[name], model, tokenizer, list(zip(every, references, strict=True)), args)


def one(
    peer: Peer,
    model: Any,
    tokenizer: Any,
    every: list[tuple[list[int], np.ndarray]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    import torch

    row: dict[str, Any] = dict.fromkeys(column.key for column in COLUMNS)
    row |= {"package": peer.package, "setting": peer.setting, "claim": peer.claim or "–", "runs": "yes"}
    try:
        few = torch.tensor([args.ids[:192]])
        model.generate(few, past_key_values=peer.make(model, tokenizer), max_new_tokens=4, do_sample=False)
        row |= scores(
            (reference, forced(model, peer.make(model, tokenizer), window, args.prompt))
            for window, reference in every
        )
        with torch.inference_mode():
            held = held_bytes(filled(peer.make(model, tokenizer), model.config))
        config = model.config
        each = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config)
        row["share"] = 100 * held / (each * LENGTH)
    except Exception as error:
        row["runs"] = type(error).__name__
        print(f"{peer.package}: {error}", file=sys.stderr)
    return row


def ours(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """latentkv's caches on the same tokens, weights in f32 too; its reference has f32 rows."""
    from latentkv import _core
    from latentkv.plan.master import planned

    plain = folder / "plain.gguf"
    words = [sys.executable, "-m", "latentkv", "convert", args.model, "-o", str(plain), "--no-plot"]
    subprocess.run([*words, "--method", "none", "--outtype", "f32"], check=True, stdout=subprocess.DEVNULL)
    model = _core.Model(str(plain))

    def logits(kv: str, window: list[int]) -> np.ndarray:
        options = planned(model, {"kv": kv})
        sizes = {"n_ctx": len(window), "n_threads": args.threads, "n_threads_batch": args.threads}
        session = _core.Session(model, **sizes, **options)
        session.decode(window[: args.prompt], output="none")
        steps = [session.decode([token], output="last")[0] for token in window[args.prompt : -1]]
        return np.stack(steps).reshape(len(steps), -1)

    every = list(windows(args.ids, args))
    references = [logits("f32", window) for window in every]
    for kv in OURS:
        found = scores(zip(references, [logits(kv, window) for window in every], strict=True))
        bytes_of = [model.forecast(LENGTH, **planned(model, {"kv": each}))["total"] for each in (kv, "f16")]
        share = 100 * bytes_of[0] / bytes_of[1]
        yield {
            "package": "latentkv",
            "setting": f"--kv {kv}",
            "claim": "–",
            "runs": "–",
            "share": share,
        } | found


def dequantized(gguf: str, folder: Path) -> None:
    """The model's weights in f32, as transformers reads them at once."""
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(gguf)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = model.config
    del config.quantization_config  # of the file, whose weights are plain now
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)


def installed(packages: tuple[str, ...], folder: Path) -> Path:
    """Where they are, and nothing else."""
    target = folder / packages[0]
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, *packages], check=True, stdout=subprocess.DEVNULL)
    return target


def every_row(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Of the peers, then of ours."""
    ids = folder / "ids.json"
    ids.write_text(json.dumps(args.ids), encoding="utf-8")
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, peer in PEERS.items():
        if not args.only or name in args.only.split(","):
            groups.setdefault(peer.packages, []).append(name)
    if groups:
        dequantized(args.model, folder / "model")
    for packages, names in groups.items():
        paths = [str(installed(packages, folder))] if packages else []
        path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        words = [
            sys.executable,
            __file__,
            str(folder / "model"),
            "--cell",
            ",".join(names),
            "--ids",
            str(ids),
        ]
        for option in ("windows", "prompt", "tokens", "threads"):
            words += [f"--{option}", str(getattr(args, option))]
        done = subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"error: [peers] expected rows of {names}; got {done.stderr.splitlines()[-1]}")
        yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"package"'))
    if not args.only or "latentkv" in args.only.split(","):
        yield from ours(args, folder)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("model", help=f"{', '.join(real_models.MODELS)} or a GGUF")
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a window's prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a window that are forced")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="some of the peers, comma separated")
    parser.add_argument("--save", metavar="NAME", help="writes bench/results/peers/NAME.json")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # these rows, in this process
    parser.add_argument("--ids", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        args.ids = json.loads(Path(args.ids).read_text(encoding="utf-8"))
        for row in measured(args):
            print(json.dumps(row), flush=True)
        return 0
    if unknown := set(args.only.split(",")) - {*PEERS, "latentkv", ""}:
        names = ", ".join(unknown)
        raise SystemExit(f"error: [--only] expected some of {', '.join(PEERS)}, latentkv; got {names}")
    from latentkv import _core

    model = args.model
    args.model = str(real_models.model_path(model).resolve())
    text = "\n".join(texts.chapters()[1])[BEGIN:].encode()
    vocabulary = _core.Model(args.model, vocab_only=True)
    args.ids = vocabulary.tokenize(text, True, False)[: args.windows * (args.prompt + args.tokens + 1)]
    import transformers

    words = ["python", "bench/peers.py", model if model in real_models.MODELS else Path(model).name]
    words += ["--windows", str(args.windows), "--prompt", str(args.prompt), "--tokens", str(args.tokens)]
    note = (
        f"`{Path(args.model).name}`, weights in f32, transformers {transformers.__version__}: {args.windows} "
        f"prompts of {args.prompt} tokens of the held-out text of `bench/inputs/texts.py`, then "
        f"{args.tokens} forced tokens each, scored against DynamicCache. Bytes: after {LENGTH} tokens."
    )
    command = shlex.join([*words, "--save", args.save or ""])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in every_row(args, Path(folder)):
            rows.append(row)
            print(", ".join(record.cell(row[c.key], c.format) for c in COLUMNS), flush=True)
            if args.save:
                path = RESULTS / "peers" / f"{args.save}.json"
                save(path, command=command, columns=COLUMNS, rows=rows, note=note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
