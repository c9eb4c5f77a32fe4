"""Command-line options that several commands share, under llama.cpp's names where it has them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from latentkv import hub, ranges
from latentkv.cli import _environment, _llama_cpp
from latentkv.console.arguments import gpu_layers, number, numbers, shares, split_mode, text, tokens_or_all
from latentkv.console.model_file import no_gguf
from latentkv.console.reading import read_text
from latentkv.drafts.worth import MOST
from latentkv.errors import expected
from latentkv.plan import presets
from latentkv.plan.options import NAMES, SessionOptions

if TYPE_CHECKING:
    from latentkv import _core
    from latentkv.drafts.model import Drafter
    from latentkv.drafts.own import OwnLayers
    from latentkv.plan.fit import Fit

DEFAULT_CONTEXT = 8192  # tokens of a sequence
_MODEL_VARIABLES = ("LLAMA_ARG_MODEL", "LLAMA_ARG_HF_REPO", "LLAMA_ARG_HF_FILE", "LLAMA_ARG_MODEL_URL")
_THREADS = replace(ranges.N_THREADS, special={0: "the default", -1: "the default"})


def add_model(parser: argparse.ArgumentParser) -> None:
    """FILE, -m FILE or -hf; read with parse()."""
    parser.add_argument("model", type=text, nargs="?", metavar="FILE", help="GGUF file")
    parser.add_argument(
        "-m", "--model", dest="model_file", type=text, metavar="FILE", help="the same, with llama.cpp's flag"
    )
    parser.add_argument(
        "-hf",
        "--hf-repo",
        type=text,
        metavar="USER/REPO[:QUANT]",
        help=f"instead of FILE: a GGUF from huggingface.co, by default {hub.DEFAULT_QUANT}",
    )
    parser.add_argument(
        "-hff",
        "--hf-file",
        type=text,
        metavar="NAME",
        help="file of that repository (* and ? match anything)",
    )
    parser.add_argument(
        "--latent", type=text, default="", metavar="FILE", help="sidecar of the model, from convert --sidecar"
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command with a model, whose path is `model` wherever it came from. llama.cpp's flags
    that change nothing are noted in one line, and so are its environment variables that count."""
    _llama_cpp.add(parser)
    args = _parsed(parser, argv)
    if args.hf_repo is None and args.hf_file is not None:
        raise expected("--hf-file", "-hf beside it", "none")
    draft = _repo_draft(args)
    named = [each for each in (args.model, args.model_file, args.hf_repo) if each is not None]
    if len(named) != 1:
        got = " and ".join(named) or "none"
        raise expected(
            parser.prog, "one of FILE, -m FILE and -hf USER/REPO", got, f"see {parser.prog} --help"
        )
    if args.hf_repo is None:
        args.model = named[0]
        if error := no_gguf(args.model):
            raise error
    if line := _llama_cpp.noted(args):
        print(f"note: {line}", file=sys.stderr)
    if args.hf_repo is not None:
        repo, quant = hub.split_name(args.hf_repo)
        args.model = str(hub.fetch(repo, quant, args.hf_file or ""))
    if draft is not None:
        args.model_draft = str(hub.fetch(*draft))
    return args


def _repo_draft(args: argparse.Namespace) -> tuple[str, str] | None:
    """-hfd's repository and quantization."""
    if not getattr(args, "hf_repo_draft", ""):
        return None
    if args.model_draft:
        raise expected("-md", "none beside -hfd", "both")
    return hub.split_name(args.hf_repo_draft, "-hfd")


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The command line before the environment; no model of the environment beside one of the command line."""
    given = _environment.words(parser, os.environ)
    if not given:
        return parser.parse_args(argv)
    if _has_model(parser, argv):
        given = {name: words for name, words in given.items() if name not in _MODEL_VARIABLES}
    if given:
        print(f"note: from the environment: {', '.join(given)}", file=sys.stderr)
    return parser.parse_args([*(word for words in given.values() for word in words), *argv])


def _has_model(parser: argparse.ArgumentParser, argv: Sequence[str]) -> bool:
    args = parser.parse_args(argv)
    return any(each is not None for each in (args.model, args.model_file, args.hf_repo))


def add_cache(parser: argparse.ArgumentParser, several: bool = False, rotate: bool = True) -> None:
    """What Session takes, but its sizes. several: --kv is a list; rotate: whether rows are stored."""
    group = parser.add_argument_group("cache", _caches())
    more = ",…" if several else ""
    group.add_argument("--kv", type=text, default="", metavar=f"CACHE{more}", help="one of the above")
    for side, short in (("k", "-ctk"), ("v", "-ctv")):
        group.add_argument(
            f"--kv-{side}",
            short,
            f"--cache-type-{side}",
            type=text,
            default="",
            metavar=f"FORMAT{more}",
            help=f"row format of {side.upper()} alone",
        )
    group.add_argument(
        "--kv-budget",
        default="",
        metavar="SIZE",
        help="cache size of a master file (convert --master): a share of f16 (14%%), bytes at a context "
        "(2.5GiB@131072), or auto: what fits",
    )
    group.add_argument(
        "--sink",
        type=number(ranges.SINK.plain()),
        default=-1,
        metavar="N",
        help="first tokens kept exact (default: the file's)",
    )
    group.add_argument(
        "--recent",
        type=number(ranges.RECENT.plain()),
        default=-1,
        metavar="N",
        help="latest tokens kept exact (default: the file's)",
    )
    group.add_argument(
        "--recent-ratio",
        type=number(ranges.RATIO),
        default=-1.0,
        metavar="P",
        help="latest tokens kept exact, as a share of the sequence after its sinks",
    )
    group.add_argument(
        "--fixed-window",
        action="store_true",
        help="keep no other tokens exact, though the cache has room for more",
    )
    group.add_argument(
        "--kv-read",
        type=tokens_or_all,
        default=0,
        metavar="N|all",
        help="on a GPU: compressed tokens that a layer reads for a decoded token, those that matter most "
        "(default: all)",
    )
    for region in ("sink", "recent"):
        group.add_argument(
            f"--kv-{region}",
            type=text,
            default="",
            metavar="FORMAT",
            help=f"row format of the {region} tokens (default: the file's, else f16)",
        )
    group.add_argument(
        "--evict",
        type=text,
        default="",
        metavar="POLICY",
        help="each layer evicts the tokens that matter least: h2o, keyformer, snapkv or none (default)",
    )
    group.add_argument(
        "--keep-tokens",
        type=text,
        default="",
        metavar="N",
        help="with --evict: tokens of a sequence that a layer keeps, or a share of its context (50%%)",
    )
    group.add_argument(
        "--prefill",
        choices=["lazy", "eager"],
        default="",
        help="lazy: prompts attend to exact K and V; eager: to their past as the cache stores it (default: "
        "the file's)",
    )
    if rotate:
        group.add_argument(
            "--no-kv-rotate",
            dest="kv_rotate",
            action="store_false",
            help="quantize full K and V without the Hadamard rotation",
        )


def add_compute(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """What Model and Session compute with. several: --threads is a list."""
    group = parser.add_argument_group("compute")
    group.add_argument(
        "-t",
        "--threads",
        type=numbers(_THREADS) if several else number(_THREADS),
        default=[0] if several else 0,
        metavar="N,…" if several else "N",
        help="threads for decoding (default: every physical core)",
    )
    group.add_argument(
        "-tb",
        "--threads-batch",
        type=number(_THREADS),
        default=0,
        metavar="N",
        help="threads for prefill (default: --threads)",
    )
    add_ubatch(group)
    add_gpu_layers(group)
    add_weights(group)
    group.add_argument(
        "--no-mmap",
        dest="mmap",
        action="store_false",
        help="read the weights into memory instead of mapping the file",
    )
    group.add_argument(
        "--mlock",
        action="store_true",
        help="keep the weights in memory: the system may not swap them out, as far as ulimit -l allows",
    )
    group.add_argument(
        "--implementation",
        choices=["fused", "reference"],
        default="fused",
        help="fused attention kernels, or stock ggml operations on the CPU",
    )
    group.add_argument(
        "--require-fused",
        action="store_true",
        help="refuse to run if attention is not fused on the requested device",
    )


def placement(args: argparse.Namespace, fit: Fit) -> dict[str, Any]:
    """_core.Model's keywords of where and how weights lie, from add_compute() and fitted()."""
    return {**fit.placement, "use_mmap": args.mmap, "use_mlock": args.mlock}


def add_gpu_layers(group: Any) -> None:
    group.add_argument(
        "-ngl",
        "--gpu-layers",
        type=gpu_layers,
        default="auto",
        metavar="N",
        help="put the last N layers on GPUs; 99 = all, auto (default) = what fits",
    )
    group.add_argument(
        "-ts",
        "--tensor-split",
        type=shares,
        default=(),
        metavar="N,N",
        help="share of these layers per GPU; 3,1 = three quarters on the first (default: by free memory)",
    )
    group.add_argument(
        "-sm",
        "--split-mode",
        type=split_mode,
        default="layer",
        metavar="MODE",
        help="layer (default): GPUs share the layers; none: --main-gpu has all",
    )
    group.add_argument(
        "-mg",
        "--main-gpu",
        type=number(ranges.MAIN_GPU),
        default=0,
        metavar="I",
        help="the GPU that has all layers with --split-mode none (default: 0)",
    )


def add_weights(group: Any) -> None:
    group.add_argument(
        "--weights",
        choices=["stored", "f32", "f16"],
        default="stored",
        help="type of the weights in memory; stored (default): the file's, with which products round "
        "activations to 8 bits where it is quantized; f32 and f16 take more memory and round less",
    )


def template(args: argparse.Namespace) -> str | None:
    """What --chat-template-file holds; None without it."""
    path: str | None = args.chat_template_file
    if path is None:
        return None
    found = read_text(path, "--chat-template-file").rstrip("\n")
    if not found:
        raise expected("--chat-template-file", "a Jinja template", f"an empty file {path}")
    return found


def file_context(args: argparse.Namespace) -> int:
    """default_context() of the file that is asked for."""
    from latentkv import _core

    return default_context(_core.Model(args.model, latent_path=args.latent, vocab_only=True).metadata)


def default_context(metadata: Mapping[str, Any]) -> int:
    """The trained context, from a file's keys: a model that is opened for its vocabulary alone has no sizes.
    Where the key is missing, opening the model says what is wrong."""
    trained = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return min(DEFAULT_CONTEXT, trained) if isinstance(trained, int) else DEFAULT_CONTEXT


def fitted(args: argparse.Namespace, n_ctx: int | str, cache: SessionOptions) -> Fit:
    """What -ngl, -c and --kv-budget come to where they are `auto`, said in one line. cache:
    cache_options()."""
    from latentkv.plan.fit import Asked, fit
    from latentkv.plan.gpus import Gpus

    gpus = Gpus(args.tensor_split, args.main_gpu, args.split_mode)
    found = fit(args.model, args.latent, Asked(args.gpu_layers, n_ctx, gpus, args.weights), cache)
    if found.said:
        print(found.said, file=sys.stderr)
    return found


def add_ubatch(group: Any) -> None:
    group.add_argument(
        "-ub",
        "--ubatch-size",
        type=number(ranges.N_UBATCH),
        default=0,
        metavar="N",
        help="tokens of a prompt that are computed together (default: 512, or 2048 where all layers are "
        "on GPUs that have the memory)",
    )


def batch_size(args: argparse.Namespace) -> int:
    """Tokens of a call: -b, or as many as -ub asks for."""
    return int(max(args.batch_size, args.ubatch_size))


def cache_options(args: argparse.Namespace, n_seq_max: int = 1) -> SessionOptions:
    """From add_cache(), add_ubatch() and, where a command has it, add_compute()."""
    given = {name: value for name, value in vars(args).items() if name in NAMES}
    if "threads" in args:
        given |= threads(args, args.threads)
    if getattr(args, "spec_type", "") == OWN_LAYERS:
        given |= {"mtp": True, "mtp_path": args.model_draft}
    return SessionOptions.of(given | {"n_ubatch": args.ubatch_size, "n_seq_max": n_seq_max})


def add_drafts(group: Any) -> None:
    """Adds --draft-max, --spec-type, -md and -hfd; drafts() and drafter() say what they ask for."""
    group.add_argument(
        "--draft-max",
        "--draft",
        "--draft-n",
        "--spec-draft-n-max",
        dest="draft_max",
        type=number(ranges.Range(0, 4096)),
        default=None,
        metavar="N",
        help="guess up to N tokens from what the text repeats, and verify them in one step (default, and the "
        f"most that pay: {MOST}; fewer where they do not come true; 0 = none)",
    )
    group.add_argument(
        "--spec-type",
        type=_spec_type,
        default="ngram-simple",
        metavar="TYPE",
        help="how tokens are guessed: none; ngram-simple (default) or another of llama.cpp's ngram types, "
        "all of which look them up in the text; draft-mtp: where the text repeats nothing, by the layers for "
        "further tokens in the model's file, or in that of -md",
    )
    group.add_argument(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        dest="model_draft",
        default="",
        metavar="FILE",
        help="a GGUF of a smaller model with the same vocabulary, which guesses where the text repeats "
        "nothing, as far as that pays",
    )
    group.add_argument(
        "-hfd",
        "-hfrd",
        "--hf-repo-draft",
        "--spec-draft-hf",
        dest="hf_repo_draft",
        default="",
        metavar="USER/REPO[:QUANT]",
        help="instead of -md: a GGUF from huggingface.co",
    )
    group.add_argument(
        "-ngld",
        "--n-gpu-layers-draft",
        "--gpu-layers-draft",
        "--spec-draft-ngl",
        dest="gpu_layers_draft",
        type=number(ranges.Range(0, 9999)),
        default=None,
        metavar="N",
        help="its layers on GPUs (default: all where the other model has some there, else 0)",
    )


def drafts(args: argparse.Namespace) -> int:
    """The most tokens that are guessed."""
    own = args.spec_type == OWN_LAYERS
    if own and args.gpu_layers_draft is not None:
        raise expected("-ngld", f"none beside --spec-type {OWN_LAYERS}", "both")
    if own and args.draft_max == 0:
        raise expected("--draft-max", f"1 or more beside --spec-type {OWN_LAYERS}", 0)
    if own and "auto" in (args.ctx_size, args.kv_budget):
        wanted = "-c N and no --kv-budget auto beside it, which do not count its memory"
        raise expected("--spec-type", wanted, "auto")
    if args.model_draft and (args.spec_type == "none" or args.draft_max == 0):
        raise expected("-md", "guesses beside it", "--spec-type none or --draft-max 0")
    if args.model_draft and "auto" in (args.ctx_size, args.kv_budget):
        raise expected("-md", "-c N and no --kv-budget auto, which do not count its memory", "auto")
    if args.spec_type == "none":
        if args.draft_max:
            raise expected("--draft-max", "0 beside --spec-type none", args.draft_max)
        return 0
    return MOST if args.draft_max is None else min(MOST, args.draft_max)


def drafter(
    args: argparse.Namespace, fit: Fit, target: _core.Model, session: _core.Session
) -> Drafter | OwnLayers | None:
    """What guesses beside prompt lookup: the file's own layers, or the model of -md, with a cache of as many
    tokens and sequences. None: nothing does."""
    if args.spec_type == OWN_LAYERS:
        from latentkv.drafts.own import OwnLayers

        return OwnLayers(lambda: session)
    if not args.model_draft:
        return None
    if session.evict != "none":
        raise expected("-md", "no --evict beside it, under which guesses would count", session.evict)
    from latentkv import _core
    from latentkv.drafts.model import Drafter
    from latentkv.plan.master import planned

    layers = args.gpu_layers_draft
    if layers is None:
        layers = 99 if fit.n_gpu_layers > 0 else 0
    model = _core.Model(args.model_draft, n_gpu_layers=layers, use_mmap=args.mmap)
    own = threads(args, args.threads) if "threads" in args else {}
    cache = planned(model, {"n_ctx": session.n_ctx, "n_seq_max": session.n_seq_max, **own})
    return Drafter.of(model, _core.Session(model, **cache), target)


OWN_LAYERS = "draft-mtp"
_SPEC_TYPES = (
    *("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"),
    OWN_LAYERS,
)


def _spec_type(given: str) -> str:
    if unknown := [each for each in given.split(",") if each not in _SPEC_TYPES]:
        raise argparse.ArgumentTypeError(f"expected {', '.join(_SPEC_TYPES)}; got {unknown[0]}")
    types = given.split(",")
    return OWN_LAYERS if OWN_LAYERS in types else "none" if types == ["none"] else "ngram-simple"


def threads(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """A session's options where --threads is `count`."""
    n_threads = max(0, count)
    return {"n_threads": n_threads, "n_threads_batch": max(0, args.threads_batch) or n_threads}


def _caches() -> str:
    """The caches to choose from, a line each."""
    lines = [
        "Caches for --kv (default: a converted file's own plan, else f16). Shares of f16's bytes are of",
        f"{presets.SHARES_AT} tokens ({presets.SHORTER}); nats are of",
        f"{presets.MODELS}.",
    ]
    lines += [f"  {name:<9} {share:>5}  {about}" for name, share, about in presets.choices()]
    lines += ["or row formats: one for K and V (q6), or a pair (c4/q5); docs/cache.md lists them"]
    return "\n".join(lines)
