"""Serve a model over HTTP: OpenAI's, Anthropic's and llama.cpp's interfaces, and a chat page."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentkv import ranges
from latentkv.cli import _options as options
from latentkv.cli._sampling import add_sampling, add_thoughts, note_thoughts, sampling_options
from latentkv.console.arguments import Parser, number, number_or_auto, text
from latentkv.console.printable import printable
from latentkv.console.reading import read_text
from latentkv.errors import LatentKVError, expected
from latentkv.quantities import bytes_text
from latentkv.session.pooling import NORMS, POOLINGS

if TYPE_CHECKING:
    from latentkv import _core
    from latentkv.engine.store import PrefixStore
    from latentkv.plan.options import SessionOptions
    from latentkv.server.serving import Serving

_EPILOG = """examples:
  latentkv serve model.gguf -c 32768 --parallel 4
  latentkv serve model.gguf --host 0.0.0.0 --api-key SECRET
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Name three rivers."}]}'

One cache of -c tokens serves all requests. Each may use what is free, up to the trained context. Requests
wait until there is room."""


PARALLEL = 4  # answers at once


def main(argv: Sequence[str]) -> int:
    args = options.parse(_parser(), argv)
    args.parallel = PARALLEL if args.parallel < 0 else args.parallel
    options.drafts(args)  # refuses what does not go together
    try:
        import uvicorn

        from latentkv.server import listening
        from latentkv.server.access.guard import hosts_of, is_loopback
        from latentkv.server.app import create_app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("latentkv"):
            raise
        hint = "pip install 'latentkv[server]'"
        raise expected("serve", "the extra server", f"no {error.name}", hint) from None
    keys = _keys(args)
    if args.isolate and not keys:
        raise expected("--isolate", "--api-key or --api-key-file beside it", "none")
    if args.keep and not args.context_shift:
        raise expected("--keep", "--context-shift beside it", "none")
    if not is_loopback(args.host) and not keys:
        print(f"warning: {args.host} can be reached from elsewhere and no --api-key is set", file=sys.stderr)
    sockets = listening.bound(args.host, args.port)
    try:
        serving = _serving(args)
    except BaseException:
        listening.released(args.host, sockets)
        raise
    app = create_app(
        serving,
        api_keys=keys,
        origins=args.cors or (),
        hosts=hosts_of(args.host, args.allowed_hosts or ()),
        max_bytes=args.max_body << 20,
        with_page=args.page,
    )
    print(_told(args, serving, listening.shown_address(args.host, args.port)), file=sys.stderr)
    config = uvicorn.Config(
        app,
        log_level="info" if args.verbose else "warning",
        timeout_keep_alive=args.timeout,
        timeout_graceful_shutdown=2 * listening.GRACE_S,
    )
    logging.raiseExceptions = False  # a log on a full disk fails no request
    logging.getLogger("uvicorn.error").addFilter(_is_no_answer_cut_short)
    try:
        listening.Server(config, serving, args.host).run(sockets)
    finally:
        serving.close()
    return 0


def _serving(args: argparse.Namespace) -> Serving:
    from latentkv import _core
    from latentkv.chat.template import template_of
    from latentkv.engine.drafting import Drafting
    from latentkv.engine.engine import Engine
    from latentkv.engine.reuse import Reuse
    from latentkv.engine.scheduler import Scheduler
    from latentkv.engine.shift import Shift, require_all_tokens
    from latentkv.plan.effect import require_effect
    from latentkv.plan.master import planned
    from latentkv.sampling.grammar import LlamaGrammar
    from latentkv.sampling.options import SamplingOptions
    from latentkv.sampling.recommended import recommended
    from latentkv.server.about import about
    from latentkv.server.access.salts import Salts
    from latentkv.server.responses.stored import StoredResponses
    from latentkv.server.serving import Serving

    n_ctx = args.ctx_size
    if n_ctx is None:
        n_ctx = options.file_context(args) * args.parallel
    fit = options.fitted(args, n_ctx, options.cache_options(args, args.parallel))
    model = _core.Model(args.model, latent_path=args.latent, **options.placement(args, fit))
    n_ctx_seq = model.n_ctx_train or options.DEFAULT_CONTEXT
    cache = replace(planned(model, fit.options), n_ctx=fit.n_ctx)
    session = _core.Session(model, **cache)
    require_effect(session, cache)
    if args.context_shift:
        require_all_tokens("--context-shift", session)
    sink = cache.sink if cache.sink >= 0 else model.regions["sink"]
    template = template_of(model, None, options.template(args))
    note_thoughts(args.reasoning_budget, lambda: template)
    drawn = recommended(model.metadata) | sampling_options(args) | {"seed": args.seed}
    if args.repeat_last_n is not None:
        drawn["penalty_last_n"] = args.repeat_last_n
    defaults = SamplingOptions(**drawn)
    scheduler = Scheduler(
        model,
        session,
        n_batch=options.batch_size(args),
        n_ctx_seq=n_ctx_seq,
        shift=Shift.of(model, args.keep, sink) if args.context_shift else None,
        reuse=Reuse.of(model, session, args.cache_reuse, sink) if args.cache_reuse else None,
        store=_store(args, model, cache, sink),
        drafting=Drafting.of(
            session,
            options.drafts(args),
            options.drafter(args, fit, model, session),
        ),
    )
    name = args.alias or Path(args.model).name.removesuffix(".gguf")
    told = about(model, session, dict(cache))
    with suppress(ValueError):  # without llguidance: a grammar is refused when it comes
        # up to half a second, which later all answers would wait for
        LlamaGrammar.from_json_schema({"type": "object"}).prepare(model)
    folder = None if scheduler.store is None else scheduler.store.folder
    serving = Serving(
        model,
        Engine(scheduler),
        template,
        name,
        defaults,
        told,
        args.n_predict,
        args.pooling,
        args.embd_normalize,
        path=str(args.model),
        strict_model=args.strict_model,
        reasoning_budget=args.reasoning_budget,
        reasoning_budget_message=args.reasoning_budget_message,
        salts=Salts(folder, args.isolate),
        responses=StoredResponses(
            args.stored_responses << 20, None if folder is None else folder / "responses"
        ),
    )
    serving.recall()
    return serving


def _store(args: argparse.Namespace, model: _core.Model, cache: SessionOptions, sink: int) -> PrefixStore:
    from latentkv.engine.store import PrefixStore
    from latentkv.plan.options import CachePolicy, RowFormats

    def of(kind: type) -> str:
        """The options of a kind. A plan is among them where there is one."""
        found = {field.name: cache[field.name] for field in fields(kind)}
        plans = {name: list(value) for name, value in found.items() if isinstance(value, tuple)}
        return repr({name: value for name, value in sorted((found | plans).items()) if value != []})

    return PrefixStore(
        f"{model.fingerprint} {of(CachePolicy)}",
        args.cache_ram << 20,
        args.cache_dir,
        args.cache_dir_size << 20,
        of(RowFormats),
        sink,
    )


def _is_no_answer_cut_short(record: logging.LogRecord) -> bool:
    """Whether a line belongs in the log: stopping the server cuts long answers short, which is no defect."""
    import asyncio

    if record.exc_info is None:
        return not record.getMessage().rstrip().endswith("CancelledError")
    return not isinstance(record.exc_info[1], asyncio.CancelledError)


def _told(args: argparse.Namespace, serving: Serving, address: str) -> str:
    told = serving.about["cache"]
    share = 100 * told["total"] / told["f16_total"]
    return (
        f"{printable(serving.name)}: {args.parallel} sequences share {serving.about['n_ctx']} tokens; the "
        f"cache takes {bytes_text(told['total'])} ({share:.3g} % of f16){_exact(told)}; attention: "
        f"{told['implementation']}\n"
        f"{address}{' (chat page)' if args.page else ''}, OpenAI's API at {address}/v1"
    )


def _exact(told: dict[str, Any]) -> str:
    if told["all_exact"] <= told["exact_at"][-1]:
        return ""
    return f", exact up to {told['all_exact']} tokens, {told['exact_at'][-1]} in a full one"


def _keys(args: argparse.Namespace) -> list[str]:
    keys = list(args.api_key or [])
    if args.api_key_file:
        keys += [
            line.strip()
            for line in read_text(args.api_key_file, "--api-key-file").splitlines()
            if line.strip()
        ]
        if not keys:
            raise LatentKVError(
                f"[--api-key-file] expected a key on each line; got none in {args.api_key_file}"
            )
    if any(not key for key in keys):
        raise expected("--api-key", "a key", "''")
    return keys


def _host(argument: str) -> str:
    """An argparse type: a name or an address, without a port."""
    name = text(argument).strip("[]")
    if not name or "/" in name or name.count(":") == 1:
        raise argparse.ArgumentTypeError(f"expected a name without a scheme and a port; got {argument!r}")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = Parser("latentkv serve", description=__doc__, epilog=_EPILOG)
    options.add_model(parser)
    _add_server(parser.add_argument_group("server"))
    options.add_cache(parser)
    options.add_compute(parser)
    options.add_drafts(parser.add_argument_group("guesses"))
    add_thoughts(parser)
    add_sampling(parser)
    return parser


def _add_server(group: Any) -> None:
    group.add_argument(
        "--host",
        type=text,
        default="127.0.0.1",
        help="name or address, or a Unix socket: PATH.sock (default: 127.0.0.1, this machine alone)",
    )
    group.add_argument(
        "--port", type=number(ranges.Range(1, 65535)), default=8080, metavar="N", help="(default: 8080)"
    )
    group.add_argument(
        "-c",
        "--ctx-size",
        type=number_or_auto(ranges.N_CTX),
        default=None,
        metavar="N",
        help="tokens of all sequences together, 0 = as trained, auto = what fits (default: "
        f"{options.DEFAULT_CONTEXT} for each, or as trained)",
    )
    group.add_argument(
        "-np",
        "--parallel",
        type=number(ranges.Range(1, 64, {-1: "the default"})),
        default=-1,
        metavar="N",
        help="answers at the same time (default: 4)",
    )
    group.add_argument(
        "-b",
        "--batch-size",
        type=number(ranges.N_BATCH),
        default=2048,
        metavar="N",
        help="prompt tokens per step, at most -ub (default: 2048)",
    )
    group.add_argument(
        "-n",
        "--n-predict",
        type=number(ranges.Range(1, special={-1: "as many as there is room for"})),
        default=-1,
        metavar="N",
        help="most tokens of an answer if the request does not say (default: -1, as many as fit)",
    )
    group.add_argument(
        "-a", "--alias", type=text, default="", metavar="NAME", help="name of the model in the API"
    )
    group.add_argument(
        "--strict-model",
        action="store_true",
        help="answer requests for other models with 404 (default: the model answers to any name)",
    )
    group.add_argument(
        "--api-key", action="append", type=text, metavar="KEY", help="require this key; may be repeated"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="the same, a key on each line")
    group.add_argument(
        "--isolate",
        action="store_true",
        help="share no cached beginning, and no stored response, between API keys",
    )
    group.add_argument(
        "--cors",
        action="append",
        type=text,
        metavar="ORIGIN",
        help="allow pages of this origin to call (*: all)",
    )
    group.add_argument(
        "--allowed-hosts",
        action="append",
        type=_host,
        metavar="NAME",
        help="also answer requests that use this host name, without a port (*: any; default: any, or only "
        "this machine's names if --host is one of them)",
    )
    group.add_argument(
        "--max-body",
        type=number(ranges.Range(1, 1024)),
        default=16,
        metavar="MIB",
        help="largest request (default: 16)",
    )
    group.add_argument(
        "--timeout",
        type=number(ranges.Range(1, 86400)),
        default=600,
        metavar="S",
        help="seconds an idle connection stays open (default: 600)",
    )
    group.add_argument(
        "--cache-reuse",
        type=number(ranges.TOKENS),
        default=0,
        metavar="N",
        help="move cached chunks of at least N tokens to where a prompt has them (default: 0 = off; needs a "
        "file converted with --prefer size)",
    )
    group.add_argument(
        "--cache-ram",
        type=number(ranges.Range(0, 1 << 20)),
        default=1024,
        metavar="MIB",
        help="memory for sequences that are dropped from the cache (default: 1024, 0 = none)",
    )
    group.add_argument(
        "--cache-dir",
        type=text,
        metavar="FOLDER",
        help="folder for them when memory is full or the server stops (default: none)",
    )
    group.add_argument(
        "--cache-dir-size",
        type=number(ranges.Range(1, 1 << 24)),
        default=10240,
        metavar="MIB",
        help="size limit of that folder (default: 10240)",
    )
    group.add_argument(
        "--stored-responses",
        type=number(ranges.Range(0, 1 << 16)),
        default=64,
        metavar="MIB",
        help="memory for responses that previous_response_id continues, and size limit of their files in "
        "--cache-dir (default: 64, 0 = none are stored)",
    )
    group.add_argument(
        "--context-shift",
        action="store_true",
        help="at the end of its context, an answer drops half of it and continues (needs a file converted "
        "with --prefer size)",
    )
    group.add_argument(
        "--keep",
        type=number(ranges.TOKENS),
        default=0,
        metavar="N",
        help="first tokens that a shift leaves (default: 0)",
    )
    group.add_argument(
        "--pooling",
        choices=POOLINGS,
        help="how the vectors of a text's tokens become an embedding (default: the file's, else none, and "
        "mean at /v1/embeddings)",
    )
    group.add_argument(
        "--embd-normalize",
        type=number(NORMS),
        default=2,
        metavar="N",
        help="the norm that embeddings are divided by: 2 = Euclidean, 1 = sum of magnitudes, p = any other, "
        "0 = the largest number becomes 32760, -1 = none (default: 2)",
    )
    group.add_argument("--no-page", dest="page", action="store_false", help="no page at /")
    group.add_argument("--chat-template-file", metavar="FILE", help="Jinja template (default: the file's)")
    group.add_argument("-v", "--verbose", action="store_true", help="log a line for each request")
