"""Options of how tokens are drawn, under llama.cpp's names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from latentkv import ranges
from latentkv.console.arguments import number, text
from latentkv.console.reading import read_text
from latentkv.errors import expected

if TYPE_CHECKING:
    from latentkv.chat.template import ChatTemplate
    from latentkv.sampling.grammar import LlamaGrammar


def add_thoughts(parser: argparse.ArgumentParser) -> None:
    """llama.cpp's options of how long a model thinks."""
    group = parser.add_argument_group("thinking")
    group.add_argument(
        "--reasoning-budget",
        type=number(ranges.Range(0, special={-1: "as many as the model likes"})),
        default=-1,
        metavar="N",
        help="tokens that a model may think before it answers (default: -1, as many as it likes; 0 = none)",
    )
    group.add_argument(
        "--reasoning-budget-message",
        type=text,
        metavar="TEXT",
        help="the last line of a thought that is ended like this (default: a sentence; '' = none)",
    )


def note_thoughts(budget: int, template: Callable[[], ChatTemplate]) -> None:
    """Says where a budget has nothing to limit."""
    if budget >= 0 and not template().thinks:
        said = "limits nothing: the chat template does not tell thoughts from answers"
        print(f"note: --reasoning-budget {said}", file=sys.stderr)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The options of create_chat_completion, llama.cpp's spelling."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "-s",
        "--seed",
        type=number(ranges.SEED),
        default=-1,
        metavar="N",
        help="the same seed gives the same text (default: -1, random)",
    )
    group.add_argument(
        "--temp",
        dest="temperature",
        type=number(ranges.RealRange(0.0)),
        metavar="X",
        help="temperature; 0 always takes the most likely token (default: the file's, else 0.8)",
    )
    group.add_argument(
        "--top-k", type=number(ranges.TOP_K), metavar="N", help="(default: the file's, else 40; 0 = off)"
    )
    group.add_argument(
        "--top-p", type=number(ranges.RATIO), metavar="X", help="(default: the file's, else 0.95; 1 = off)"
    )
    group.add_argument(
        "--min-p", type=number(ranges.RATIO), metavar="X", help="(default: the file's, else 0.05; 0 = off)"
    )
    group.add_argument(
        "--typical",
        dest="typical_p",
        type=number(ranges.RATIO),
        default=1.0,
        metavar="X",
        help="(default: 1 = off)",
    )
    group.add_argument(
        "--repeat-penalty",
        type=number(ranges.RealRange(1e-3)),
        metavar="X",
        help="(default: the file's, else 1 = off)",
    )
    group.add_argument(
        "--repeat-last-n",
        type=number(ranges.PENALTY_WINDOW),
        metavar="N",
        help="tokens that penalties look at (default: the file's, else 64; -1 = the context)",
    )
    group.add_argument(
        "--frequency-penalty",
        type=number(ranges.ANY_NUMBER),
        default=0.0,
        metavar="X",
        help="(default: 0 = off)",
    )
    group.add_argument(
        "--presence-penalty",
        type=number(ranges.ANY_NUMBER),
        default=0.0,
        metavar="X",
        help="(default: 0 = off)",
    )
    group.add_argument(
        "--mirostat",
        dest="mirostat_mode",
        type=int,
        choices=[0, 1, 2],
        help="(default: the file's, else 0 = off)",
    )
    group.add_argument(
        "--mirostat-lr",
        dest="mirostat_eta",
        type=number(ranges.RealRange(0.0)),
        metavar="X",
        help="learning rate eta (default: the file's, else 0.1)",
    )
    group.add_argument(
        "--mirostat-ent",
        dest="mirostat_tau",
        type=number(ranges.RealRange(0.0)),
        metavar="X",
        help="target entropy tau (default: the file's, else 5)",
    )
    group.add_argument("--grammar", type=text, metavar="GBNF", help="constrain the answer to this grammar")
    group.add_argument("--grammar-file", metavar="FILE", help="the same, from a file")
    group.add_argument(
        "-j", "--json-schema", type=text, metavar="SCHEMA", help="constrain the answer to JSON of this schema"
    )
    group.add_argument("-jf", "--json-schema-file", metavar="FILE", help="the same, from a file")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that the command line gives, as keywords of create_completion and create_chat_completion; all but
    the seed."""
    from latentkv.sampling.options import NAMES

    given = {name: value for name, value in vars(args).items() if name in NAMES and value is not None}
    given.pop("seed", None)
    return given | {"grammar": _grammar(args)}


def _grammar(args: argparse.Namespace) -> LlamaGrammar | None:
    from latentkv.sampling.grammar import LlamaGrammar

    names = ("grammar", "grammar_file", "json_schema", "json_schema_file")
    given = [name for name in names if getattr(args, name) is not None]
    if len(given) > 1:
        flags = ["--" + name.replace("_", "-") for name in given]
        raise expected(" and ".join(flags), "one of them", "several")
    if args.grammar is not None:
        return LlamaGrammar.from_string(args.grammar)
    if args.grammar_file is not None:
        return LlamaGrammar.from_file(args.grammar_file)
    if args.json_schema_file is not None:
        return LlamaGrammar.from_json_schema(read_text(args.json_schema_file, "--json-schema-file"))
    return None if args.json_schema is None else LlamaGrammar.from_json_schema(args.json_schema)
