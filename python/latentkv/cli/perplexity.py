"""Measure perplexity on a text, and the divergence from another cache."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latentkv import ranges
from latentkv.cli import _options as options
from latentkv.console.arguments import Parser, number, text
from latentkv.console.progress import stage
from latentkv.console.reading import read_text
from latentkv.console.terminal import Block, show, table
from latentkv.errors import expected
from latentkv.quantities import digits, tenths

_EPILOG = """examples:
  latentkv perplexity model.gguf -f wiki.txt -c 2048
  latentkv perplexity model.gguf -f wiki.txt --kv small --decode --kld-against f16 --weights f32
  latentkv perplexity small.gguf -f wiki.txt --kld-against model.gguf:f16 --json"""


_WEIGHTS = {"stored": "weights as stored", "f32": "weights in f32", "f16": "weights in f16"}
_MUCH = 0.05  # of a divergence: as much as its standard error over some thousand tokens


def main(argv: Sequence[str]) -> int:
    args = options.parse(_parser(), argv)
    from latentkv import _core
    from latentkv.measure.perplexity import Cache, Progress, perplexity
    from latentkv.plan.fit import require_room
    from latentkv.version import version

    text = read_text(args.file, "-f")
    parallel = max(1, args.parallel)
    n_ctx = args.ctx_size or min(options.file_context(args), 1024)
    fit = options.fitted(args, n_ctx * parallel, options.cache_options(args, parallel))
    model = _core.Model(args.model, latent_path=args.latent, **options.placement(args, fit))
    against = None
    if args.kld_against:
        path, format_name = split_reference(args.kld_against)
        if path:
            require_room(path, "", fit)
        if path is None and not model.is_plain:
            print(f"warning: {_of_latents(args, format_name)}", file=sys.stderr)
        other = _core.Model(path, **options.placement(args, fit)) if path else model
        against = Cache(other, fit.options.reference(format_name))
    with stage(0, "perplexity", "window") as bar:

        def shown(p: Progress) -> None:
            bar.total = p.of
            bar.note(f"ppl {p.ppl:.4f}")
            bar.reach(p.windows)

        result = perplexity(
            Cache(model, fit.options),
            text,
            n_ctx=n_ctx,
            window=args.window,
            chunks=args.chunks,
            decode=args.decode,
            parallel=args.parallel,
            n_ubatch=args.ubatch_size,
            against=against,
            floor=args.floor,
            depth_buckets=args.depth_buckets,
            progress=shown,
        )
    result |= {
        "model": args.model,
        "latent": args.latent or None,
        "text": args.file,
        "kv": args.kv
        or "/".join(filter(None, (args.kv_k, args.kv_v)))
        or str(fit.options.kv_budget or "file"),
        "kld_against": args.kld_against,
        "command": shlex.join(["latentkv", "perplexity", *argv]),
        "version": version(),
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(*report(result))
    return 0


def _of_latents(args: argparse.Namespace, format_name: str) -> str:
    """What a reference of a converted file's own latents hides."""
    full = f"{args.model if args.latent else 'GGUF'}:{format_name}"
    wanted = f"{full}, the file before its conversion, to count what latents lose"
    return str(expected("--kld-against", wanted, f"{format_name}, the latents of this file in that format"))


def _parser() -> argparse.ArgumentParser:
    parser = Parser("latentkv perplexity", description=__doc__, epilog=_EPILOG)
    options.add_model(parser)
    parser.add_argument("-f", "--file", required=True, metavar="TEXT", help="UTF-8 text to score")
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=number(ranges.Range(1, ranges.N_CTX.high, {0: "the default"})),
        default=0,
        metavar="N",
        help="tokens per window (default: 1024, or less if trained on less)",
    )
    parser.add_argument(
        "--window",
        choices=["llama", "plain"],
        default="llama",
        help="llama: score each window's second half, as llama-perplexity does (default); plain: all of it",
    )
    parser.add_argument(
        "--chunks", type=number(ranges.POSITIVE), metavar="N", help="at most N windows (default: all)"
    )
    parser.add_argument(
        "--decode", action="store_true", help="token by token through the cache, as when generating"
    )
    parser.add_argument(
        "--parallel",
        type=number(ranges.N_SEQ_MAX),
        default=0,
        metavar="N",
        help="windows that run together (default: 8 with --decode)",
    )
    parser.add_argument(
        "--kld-against",
        type=text,
        metavar="REF",
        help="compare with another cache on the same tokens: f16 or any other of --kv, or GGUF[:CACHE]",
    )
    parser.add_argument(
        "--no-floor",
        dest="floor",
        action="store_false",
        help="with --kld-against: do not measure how much of the figure is rounding of these weights",
    )
    parser.add_argument("--depth-buckets", action="store_true", help="also show results by context depth")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options.add_cache(parser)
    options.add_compute(parser)
    return parser


def split_reference(text: str) -> tuple[str | None, str]:
    """`--kld-against` to (path or None for the same file, format or "" for the file's own).

    >>> split_reference("f16"), split_reference("dir/m.gguf"), split_reference("m.gguf:q8_0")
    ((None, 'f16'), ('dir/m.gguf', ''), ('m.gguf', 'q8_0'))
    """
    if Path(text).is_file() or text.endswith(".gguf"):
        return text, ""
    path, colon, format_name = text.rpartition(":")
    if colon and (path.endswith(".gguf") or Path(path).is_file()):
        return path, format_name
    if "/" in text or "." in text:
        raise expected("--kld-against", "a format or an existing GGUF[:format]", repr(text))
    return None, text


def report(r: dict[str, Any]) -> list[Block]:
    """What people read: one line without a reference, llama-perplexity's statistics with one."""
    allocated = r["kv_bytes"] / (r["parallel"] * r["n_ctx"])
    exact = ""
    if allocated > 1.01 * r["kv_bytes_per_token"]:
        exact = f"; {tenths(allocated)} with exact tokens, at a context of {r['n_ctx']}"
    lines: list[Block] = [
        f"perplexity  {r['ppl']:.4f} ± {r['ppl_se']:.4f}   "
        f"({r['tokens']} tokens scored in {'the second halves of ' if r['window'] == 'llama' else ''}"
        f"{r['chunks']} windows of {r['n_ctx']}"
        f"{', decoded one by one' if r['decode'] else ''})",
        f"cache       {tenths(r['kv_bytes_per_token'])} bytes per token, "
        f"{100 * r['share_of_f16']:.1f} % of f16's{exact}",
        f"speed       {r['tokens_per_second']:.0f} tokens/s",
    ]
    if "kld" in r:
        lines += ["", *_against(r)]
    if "depth" in r:
        lines += ["", _depth_table(r["depth"])]
    return lines


def _against(r: dict[str, Any]) -> list[Block]:
    kld, floor = r["kld"], r["floor"]
    names = ("median", "p90", "p95", "p99", "p999", "max")
    rows = [["cache", *(f"{kld[name]:.6f}" for name in names)]]
    of_kld = of_top = ""
    if floor:
        rows.append(["rounding", *(f"{floor['kld'][name]:.6f}" for name in names)])
        mean = digits(floor["kld"]["mean"], 2)
        of_kld = f", of which {mean} is rounding of these weights"
        if floor["kld"]["mean"] >= kld["mean"]:
            of_kld = f", no more than rounding of these weights ({mean})"
        of_top = f"; {100 * floor['same_top']:.3f} % with rounding alone"
    lines: list[Block] = [
        f"against {r['kld_against']} ({tenths(r['kv_bytes_per_token_ref'])} bytes per token), "
        f"{_WEIGHTS[r['weights']]}",
        f"  perplexity ratio  {r['ppl_ratio']:.5f} ± {r['ppl_ratio_se']:.5f}"
        f"   (reference {r['ppl_ref']:.4f})",
        f"  KL divergence     {kld['mean']:.6f} ± {kld['mean_se']:.6f}{of_kld}",
        f"  same top token    {100 * r['same_top']:.3f} ± {100 * r['same_top_se']:.3f} %{of_top}",
        f"  RMS Δp            {100 * r['rms_dp']:.3f} ± {100 * r['rms_dp_se']:.3f} %",
        "",
        table(["KLD", "median", "90 %", "95 %", "99 %", "99.9 %", "max"], rows),
    ]
    if floor:
        windows = f", first {floor['chunks']} windows" if floor["chunks"] < r["chunks"] else ""
        lines.append(f"rounding: what a last bit of f16 rows makes{windows}")
        if r["weights"] == "stored" and floor["kld"]["mean"] > _MUCH * kld["mean"]:
            lines.append("--weights f32, where memory allows, measures the cache without it")
    return lines


def _depth_table(rows: list[dict[str, Any]]) -> Block:
    with_kld = "kld" in rows[0]
    header = ["depth", "tokens", "ppl", *(["KLD mean", "KLD 99 %", "same top"] if with_kld else [])]
    body = []
    for row in rows:
        kld = (
            [f"{row['kld']['mean']:.6f}", f"{row['kld']['p99']:.6f}", f"{row['same_top']:.4f}"]
            if with_kld
            else []
        )
        body.append([f"{row['from']} … {row['to'] - 1}", str(row["tokens"]), f"{row['ppl']:.3f}", *kld])
    return table(header, body)
