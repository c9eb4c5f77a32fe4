"""The command line of bench/ladder.py, and what a reader types for the whole table."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

import record
from inputs import real_models
from ladder.libllama import PROGRAM
from record import RESULTS


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help=f"{', '.join(real_models.MODELS)}, a GGUF or a checkpoint")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--name", help="of the result (default: the model's)")
    parser.add_argument("--out", type=Path, help="default: bench/results/ladder-NAME.json")
    parser.add_argument("--work", type=Path, default=Path("build/ladder"), help="where GGUF files go")
    parser.add_argument("--calib", type=Path, help="text to calibrate on")
    parser.add_argument("--text", type=Path, help="text to measure on")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose name it finds; f16 always")
    parser.add_argument("-c", "--ctx-size", type=int, default=4096)
    parser.add_argument("--chunks", type=int, default=4, help="windows, decoded together (default 4)")
    parser.add_argument("--scored", type=int, default=0, help="tokens of a window (default: its second half)")
    parser.add_argument("--samples", type=int, default=8, help="hidden numbers per depth (default 8)")
    parser.add_argument("--chars", type=int, default=6000, help="of a text with a number (default 6000)")
    parser.add_argument("--answers", type=int, default=64, help="long answers (default 64)")
    parser.add_argument("--tokens", type=int, default=700, help="of a long answer (default 700)")
    parser.add_argument("--parallel", type=int, default=64, help="answers at a time (default 64)")
    parser.add_argument(
        "--outtype", default="f16", help='of the weights (default f16, see above; "" leaves them as they are)'
    )
    parser.add_argument("--calib-tokens", type=int, default=0, help="of every conversion")
    parser.add_argument("--fisher-tokens", type=int, default=0, help="of every conversion")
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: 4 a GPU, else 1)")
    parser.add_argument("-t", "--threads", type=int, default=0, help="of a process")
    parser.add_argument("--llama-cpp", type=Path, default=PROGRAM, help="program (bench/ladder/llama_cpp)")
    parser.add_argument("--plot", action="store_true", help="also draw divergence over bytes")
    parser.add_argument("--keep-files", action="store_true", help="of published methods too")
    parser.add_argument("--restart", action="store_true", help="forget finished cells")
    args = parser.parse_args()
    args.name = args.name or real_models.stem(args.model)
    args.out = args.out or RESULTS / f"ladder-{args.name}.json"
    args.jobs = args.jobs or (4 * max(1, len(gpus())) if args.device == "cuda" else 1)
    return args


def command_line(args: argparse.Namespace) -> str:
    """What a reader types in the root for the whole table; what lies outside it by name."""
    words = ["python", "bench/ladder.py", real_models.shown(args.model), "--device", args.device]
    for name in ("calib", "text"):
        path = getattr(args, name)
        words += [f"--{name}", record.shown(path)] if path else []
    words += ["-c", str(args.ctx_size), "--chunks", str(args.chunks), "--samples", str(args.samples)]
    words += ["--scored", str(args.scored)] if args.scored else []
    words += ["--chars", str(args.chars)] if args.samples else []
    words += ["--answers", str(args.answers)] + (["--tokens", str(args.tokens)] if args.answers else [])
    words += ["--outtype", args.outtype] if args.outtype != "f16" else []
    words += ["--calib-tokens", str(args.calib_tokens)] if args.calib_tokens else []
    words += ["--fisher-tokens", str(args.fisher_tokens)] if args.fisher_tokens else []
    return shlex.join(words)


def gpus() -> list[str]:
    import torch

    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",") if seen else [str(index) for index in range(torch.cuda.device_count())]
