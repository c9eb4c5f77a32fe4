"""Measure prefill and decode speed by depth and cache format."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from latentkv import ranges
from latentkv.cli import _options as options
from latentkv.cli._table import markdown
from latentkv.console.arguments import Parser, number
from latentkv.console.progress import stage
from latentkv.console.terminal import show, table
from latentkv.errors import expected
from latentkv.quantities import bytes_text, count_text

_EPILOG = """examples:
  latentkv bench model.gguf -d 0,4096,16384 --kv f16,small
  latentkv bench model.gguf -p 0 -n 64 -d 32768 --kv q8/q4 --json

"cache" is what the cache of that row takes in memory. It is filled with random tokens."""


def main(argv: Sequence[str]) -> int:
    args = options.parse(_parser(), argv)
    threads, args.threads = args.threads, args.threads[0]
    depths = numbers(args.depth, "-d")
    formats = caches(args.kv, args.kv_k, args.kv_v)
    prompts, answers = numbers(args.n_prompt, "-p"), numbers(args.n_gen, "-n")
    if not any((*prompts, *answers)):
        raise expected("-p, -n", "a test with tokens", f"-p {args.n_prompt} -n {args.n_gen}")
    longest = max(depths) + max(*prompts, *answers)
    ranges.N_CTX.plain().check("-d, -p, -n", longest)
    pairs = [pair for pair in itertools.zip_longest(prompts, answers, fillvalue=0) if any(pair)]
    from latentkv import _core
    from latentkv.measure.bench import Measurement, measure

    args.kv, args.kv_k, args.kv_v = formats[0], "", ""
    fit = options.fitted(args, longest, options.cache_options(args))
    model = _core.Model(args.model, latent_path=args.latent, **options.placement(args, fit))
    rows: list[Measurement] = []
    n_tests = sum(n > 0 for n in (*prompts, *answers))
    n_filled = len(pairs) * sum(depth > 0 for depth in depths)
    n_runs = len(threads) * len(formats) * (len(depths) * n_tests * (args.repetitions + 1) + n_filled)
    try:
        with stage(n_runs, "bench", "run") as bar:
            runs = itertools.count()

            def begins(text: str) -> None:
                bar.note(text)
                bar.reach(next(runs))

            tests = itertools.product(threads, formats, depths, pairs)
            for n_threads, kv, depth, (prefill, decode) in tests:
                measured = measure(
                    model,
                    kv,
                    depth,
                    prefill=prefill,
                    decode=decode,
                    repetitions=args.repetitions,
                    options=replace(fit.options, **options.threads(args, n_threads)),
                    note=begins,
                )
                rows.extend(measured)  # one by one
            bar.reach(n_runs)
    finally:  # what was measured before a test that fails
        if rows:
            _show(model, args, argv, rows)
    return 0


def _show(model: Any, args: argparse.Namespace, argv: Sequence[str], rows: list[Any]) -> None:
    from latentkv import _core
    from latentkv.version import version

    if args.output == "json":
        result = {
            "model": args.model,
            "latent": args.latent or None,
            "name": model.metadata.get("general.name"),
            "size_bytes": model.size_bytes,
            "n_params": model.n_params,
            "build": _core.build_info(),
            "command": shlex.join(["latentkv", "bench", *argv]),
            "version": version(),
            "results": [row.as_dict() for row in rows],
        }
        print(json.dumps(result, indent=2))
    else:
        layout = markdown if args.output == "md" else table
        header = ["model", "kv", "test", "size", "params", "threads", "t/s", "cache"]
        show(layout(header, _cells(model, args, rows), left=3))


def _cells(model: Any, args: argparse.Namespace, rows: list[Any]) -> list[list[str]]:
    name = str(model.metadata.get("general.name") or model.metadata.get("general.architecture"))
    return [
        [
            name,
            row.kv or args.kv_budget or ("f16" if model.is_plain else "file"),
            row.name,
            bytes_text(model.size_bytes),
            count_text(model.n_params),
            str(max(0, row.threads) or "auto"),
            f"{row.mean:.2f} ± {row.sd:.2f}",
            bytes_text(row.kv_bytes),
        ]
        for row in rows
    ]


def _parser() -> argparse.ArgumentParser:
    parser = Parser("latentkv bench", description=__doc__, epilog=_EPILOG)
    options.add_model(parser)
    parser.add_argument(
        "-p",
        "--n-prompt",
        default="512",
        metavar="N,…",
        help="prefill N tokens (default: 512, 0 = skip)",
    )
    parser.add_argument(
        "-n",
        "--n-gen",
        default="32",
        metavar="N,…",
        help="decode N tokens (default: 32, 0 = skip)",
    )
    parser.add_argument(
        "-d", "--depth", default="0", metavar="N,…", help="tokens in the cache before the test (default: 0)"
    )
    parser.add_argument(
        "-r",
        "--repetitions",
        type=number(ranges.POSITIVE),
        default=3,
        metavar="N",
        help="runs per test after a warm-up (default: 3)",
    )
    parser.add_argument(
        "-o", "--output", choices=["text", "md", "json"], default="text", help="(default: text)"
    )
    parser.add_argument(
        "--json", dest="output", action="store_const", const="json", help="the same as -o json"
    )
    options.add_cache(parser, several=True)
    options.add_compute(parser, several=True)
    return parser


def caches(kv: str, kv_k: str, kv_v: str) -> list[str]:
    """What --kv lists, or every pair of what -ctk and -ctv do.

    >>> caches("f16,small", "", ""), caches("", "q8_0,q4_0", "")
    (['f16', 'small'], ['q8_0/f16', 'q4_0/f16'])
    """
    if kv and (kv_k or kv_v):
        raise expected("--kv", "no -ctk and -ctv beside it", kv)
    if not (kv_k or kv_v):
        return _listed("--kv", kv)
    pairs = itertools.product(_listed("-ctk", kv_k or "f16"), _listed("-ctv", kv_v or "f16"))
    return [k if k == v else f"{k}/{v}" for k, v in pairs]


def _listed(flag: str, names: str) -> list[str]:
    found = [name.strip().lower() for name in names.split(",")]
    if len(found) > 1 and not all(found):
        raise expected(flag, "formats separated by commas", repr(names))
    return found


def numbers(text: str, flag: str) -> list[int]:
    """`0,4096` to a list.

    >>> numbers("0,4096", "-d")
    [0, 4096]
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise expected(flag, "numbers separated by commas", repr(text)) from None
    return [ranges.TOKENS.check(flag, value) for value in values]
