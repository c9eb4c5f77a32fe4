"""Command line of the converter: `latentkv convert` and tools/convert/convert_lowrank.py."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latentkv.console.arguments import Parser, text
from latentkv.console.printable import printable
from latentkv.console.terminal import show
from latentkv.errors import LatentKVError
from latentkv.quantities import bytes_text

from . import limits
from .compute import heap
from .errors import ConvertError, Interrupted
from .files import Progress
from .plan import methods
from .recipe import Finetune, Recipe
from .weights.tensor import FACTOR_TYPES, OUTTYPES

DEFAULT_METHOD = "waterfill"
_EXAMPLES = """examples:
  latentkv convert model-Q4_K_M.gguf -o smaller.gguf
  latentkv convert model-Q4_K_M.gguf -o smaller.gguf --kv-budget 8.5% --calib mine.txt --device cuda
  latentkv chat smaller.gguf -c 65536"""
FISHER_TOKENS, QUICK_TOKENS = 32768, 8192
_COMMON = {field.name for field in dataclasses.fields(Recipe)} - {"options", "finetune"}
_FINETUNE = tuple(field.name for field in dataclasses.fields(Finetune) if field.name != "text")


def build_parser(method: str, prog: str) -> Parser:
    """The common options and those of one method."""
    summaries = "\n".join(f"  {name:<10} {methods.module(name).SUMMARY}" for name in methods.names())
    parser = Parser(
        prog,
        description="Convert a GGUF or a Hugging Face checkpoint to a GGUF with a smaller KV cache.",
        epilog=f"methods:\n{summaries}\n\nOptions of a method: {prog} --method NAME --help\n\n{_EXAMPLES}",
    )
    parser.add_argument(
        "source",
        type=Path,
        nargs="?",
        metavar="SOURCE",
        help="a GGUF (any shard of a split one), or a directory with config.json and weights",
    )
    parser.add_argument("-m", "--model", type=Path, metavar="SOURCE", help="the same, with llama.cpp's flag")
    parser.add_argument(
        "-hf", "--hf-repo", metavar="USER/REPO[:QUANT]", help="instead of SOURCE: a GGUF from huggingface.co"
    )
    parser.add_argument("-hff", "--hf-file", metavar="NAME", help="file of that repository")
    parser.add_argument(
        "-o", "--output", type=_output, required=True, metavar="OUT.gguf", help="file to write"
    )
    methods.module(method).add_arguments(parser.add_argument_group(f"size and quality (--method {method})"))
    text = parser.add_argument_group("calibration text")
    text.add_argument(
        "--calib",
        type=Path,
        action="append",
        metavar="FILE",
        help="a UTF-8 text like the ones you will ask about, repeatable (default: prose, code, chats and "
        "hidden numbers from your Python installation)",
    )
    text.add_argument(
        "--calib-tokens",
        type=limits.positive,
        default=65536,
        metavar="N",
        help="tokens to read with methods other than waterfill, and for --imatrix (default 65536)",
    )
    text.add_argument(
        "--calib-window",
        type=limits.positive,
        default=2048,
        metavar="N",
        help="tokens per window (default 2048)",
    )
    text.add_argument(
        "--fisher-tokens",
        type=limits.positive,
        default=None,
        metavar="N",
        help=f"tokens to compute gradients on (default {FISHER_TOKENS}; {QUICK_TOKENS} with --quick)",
    )
    text.add_argument(
        "--device", type=_device, default="cpu", help="where the model runs: cpu (default) or cuda"
    )
    text.add_argument(
        "--no-cache",
        dest="cache",
        action="store_false",
        help="neither read nor keep statistics of the text and finished layers of an interrupted run (else "
        "in ~/.cache/latentkv or $XDG_CACHE_HOME, 8 GiB at most)",
    )
    _add_weights(parser.add_argument_group("weights"))
    _add_finetune(parser.add_argument_group("recovery training (keys that are rebuilt or have no RoPE)"))
    other = parser.add_argument_group("other")
    other.add_argument(
        "--method",
        default=DEFAULT_METHOD,
        metavar="NAME",
        help=f"see below (default {DEFAULT_METHOD})",
    )
    other.add_argument(
        "--rotate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Hadamard rotation of latents, merged into the factors (default on)",
    )
    other.add_argument(
        "--center",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="store rows about their mean where it is a large part of them (default on; lossless)",
    )
    other.add_argument(
        "--seed", type=limits.natural, default=0, help="seed of sampling and rotation (default 0)"
    )
    other.add_argument(
        "--pre", metavar="NAME", help="tokenizer.ggml.pre, if the tokenizer's split rules are unknown"
    )
    other.add_argument("--no-plot", dest="plot", action="store_false", help="draw no picture of the ranks")
    return parser


def _add_weights(group: Any) -> None:
    group.add_argument(
        "--outtype",
        type=str.lower,
        choices=OUTTYPES,
        help="type of the weights (default: f16 for a checkpoint, unchanged for a GGUF)",
    )
    group.add_argument(
        "--sidecar",
        action="store_true",
        help="write only factors and plan, a few percent of the GGUF; open with MODEL.gguf --latent OUT.gguf",
    )
    group.add_argument(
        "--factor-type",
        type=str.lower,
        choices=FACTOR_TYPES,
        help="type of factors that replace K's and V's projections (default: the weights' own, q8_0 beside "
        "K-quants); other factors are f16, or f32",
    )
    group.add_argument(
        "--imatrix",
        action=argparse.BooleanOptionalAction,
        help="K-quants: weigh errors by an importance matrix (default: with --calib)",
    )


def _add_finetune(group: Any) -> None:
    group.add_argument(
        "--finetune", type=Path, metavar="TEXT", help="train LoRA adapters on this text and merge them"
    )
    group.add_argument(
        "--steps", type=limits.positive, metavar="N", help="steps of 4 x 512 tokens (default 200)"
    )
    group.add_argument(
        "--lora-rank", type=limits.positive, metavar="R", help="rank of the adapters (default 32)"
    )
    group.add_argument("--lr", type=_rate, metavar="X", help="peak learning rate (default 2e-4)")
    group.add_argument(
        "--lora-on",
        choices=("a", "ab"),
        help="train adapters on A alone, or on A and B (default ab)",
    )


def _output(name: str) -> Path:
    """A name that the runtime opens as well, whose names are UTF-8."""
    return Path(text(name))


def _device(text: str) -> str:
    """Its form alone; whether torch has the device shows when torch is needed."""
    if not re.fullmatch(r"(cpu|cuda|mps|xpu)(:[0-9]{1,2})?", text):
        raise argparse.ArgumentTypeError(f"cpu, cuda, mps or xpu, or one of several as cuda:1; got {text}")
    return text


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"a learning rate above 0 and below 1; got {text}")
    return value


def _finetune(chosen: dict[str, Any]) -> Finetune | None:
    """Takes its options out of `chosen`.

    Raises:
        ConvertError: one of them without --finetune.
    """
    text = chosen.pop("finetune")
    given = {name: value for name in _FINETUNE if (value := chosen.pop(name)) is not None}
    if text is None and given:
        raise ConvertError(f"--{next(iter(given)).replace('_', '-')}", "--finetune TEXT beside it", "none")
    return None if text is None else Finetune(text, **given)


def _source(chosen: dict[str, Any]) -> Path:
    """SOURCE, or what -m or -hf names, which it takes out of `chosen`."""
    source, model = chosen["source"], chosen.pop("model")
    if source is not None and model is not None:
        raise ConvertError("source", "SOURCE or -m SOURCE", "both")
    source = model if source is None else source
    repo, file = chosen.pop("hf_repo"), chosen.pop("hf_file")
    if repo is None and file is not None:
        raise ConvertError("--hf-file", "-hf beside it", "none")
    if (source is None) == (repo is None):
        raise ConvertError("source", "SOURCE or -hf USER/REPO", "none" if source is None else "both")
    if source is not None:
        return Path(source)
    from latentkv import hub

    return hub.fetch(*hub.split_name(repo), file or "")


def parse(argv: Sequence[str], prog: str) -> Recipe:
    """Two passes: the method's name decides which options exist."""
    argv = [re.sub("^--outfile(?==|$)", "--output", word) for word in argv]  # llama.cpp's name
    first = Parser(prog, add_help=False)
    first.add_argument("--method", default=None)
    method = first.parse_known_args(list(argv))[0].method or DEFAULT_METHOD
    parser = build_parser(method, prog)
    _require_method(parser, method, argv)
    chosen = vars(parser.parse_args(list(argv)))
    chosen["source"] = _source(chosen)
    common = {name: chosen.pop(name) for name in _COMMON}
    if common["fisher_tokens"] is None:
        common["fisher_tokens"] = QUICK_TOKENS if chosen.get("quick") else FISHER_TOKENS
    common["calib"] = tuple(common["calib"] or ())
    finetune = _finetune(chosen)
    return Recipe(options=chosen, finetune=finetune, **common)


def _require_method(parser: Parser, method: str, argv: Sequence[str]) -> None:
    """Raises ConvertError for an option of another method than this one."""
    for word in argv:
        name = word.split("=")[0]
        if not name.startswith("--") or name in parser._option_string_actions:
            continue
        theirs = [other for other in methods.names() if name in options_of(other)]
        if theirs:
            wanted = f"--method {theirs[0]}" if len(theirs) == 1 else f"a method of {', '.join(theirs)}"
            if (name, method) == ("--keep", DEFAULT_METHOD):
                wanted = "--kv-budget SIZE, or a method that keeps a share of the dimensions (--method palu)"
            raise ConvertError(name, wanted, f"--method {method}")


def options_of(method: str) -> set[str]:
    """The names of a method's own options."""
    parser = Parser(method, add_help=False)
    methods.module(method).add_arguments(parser)
    return set(parser._option_string_actions)


def main(argv: Sequence[str] | None = None, prog: str = "latentkv convert") -> int:
    """Exit status: 0 done, 2 bad input, 130 interrupted, 143 asked to end."""
    progress, stop = Progress(()), _Stop()
    try:
        recipe = parse(sys.argv[1:] if argv is None else argv, prog)
        progress = Progress(recipe.outputs)
        # Threads that wait for each other sleep. Else they spin: beside other programs a conversion has taken
        # four times the processor time. Read when torch is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        heap.keep_freed()
        from .pipeline import convert

        with stop:
            report = convert(recipe)
    except (ConvertError, LatentKVError) as error:
        return _failed(str(error), progress)
    except MemoryError:
        return _failed("[memory] expected room for one layer; got none; lower --calib-tokens", progress)
    except BrokenPipeError:  # of our output: the command's own business
        raise
    except OSError as error:
        where, why = error.filename or "files", error.strerror or str(error)
        return _failed(f"[files] expected to read and write {where}; got {why}", progress)
    except RuntimeError as error:
        if "out of memory" not in str(error):  # torch's own class needs torch to be named
            raise
        return _failed(f"[memory] expected room on --device; got {str(error).splitlines()[0]}", progress)
    except KeyboardInterrupt as stopped:
        kept = str(stopped) if isinstance(stopped, Interrupted) else ""
        said = "; ".join(part for part in (str(progress) or "nothing written", kept) if part)
        print(printable(f"error: [convert] interrupted; {said}"), file=sys.stderr)
        return stop.status
    show(*report.blocks(), "")
    for path in report.files:
        print(f"wrote {path} ({bytes_text(path.stat().st_size)})")
    files = [recipe.source, "--latent", recipe.output] if recipe.sidecar else [recipe.output]
    print(printable(f"to run it: {shlex.join(['latentkv', 'chat', '-m', *map(str, files)])}"))
    return 0


class _Stop:
    """While it is entered, a request to end (SIGTERM) stops a conversion as Ctrl-C does."""

    def __init__(self) -> None:
        self.status = 130
        self._before: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._stop)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _stop(self, *_: object) -> None:
        self.status = 128 + signal.SIGTERM
        raise KeyboardInterrupt


def _failed(message: str, progress: Progress) -> int:
    """One line that names what is complete all the same."""
    said = "; ".join(part for part in (f"error: {message}", str(progress)) if part)
    print(printable(said), file=sys.stderr)
    return 2
