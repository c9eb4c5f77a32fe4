"""The command `latentkv`. Each module of this package is one command; names with an underscore are
helpers."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Sequence

from latentkv.cli._errors import ABORTED, BAD_INPUT, one_line
from latentkv.console import streams
from latentkv.errors import expected

# programs of llama.cpp, and commands of Ollama, under other names
_ELSEWHERE = {
    "cli": "chat",
    "run": "chat",
    "server": "serve",
    "show": "info",
    "create": "convert",
    "quantize": "convert SOURCE -o OUT.gguf --method none --outtype TYPE",
    "pull": "chat -hf USER/REPO",
}
_PIPE_CLOSED = 141  # 128 + SIGPIPE, as the shell reports it


def commands() -> list[str]:
    """Names of the commands: the directory is the registry."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Status 0; 2 for bad input, said in one line; 130 after Ctrl-C; 141 where a reader of
    the output is gone."""
    streams.prepare()
    try:
        status = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return ABORTED
    except BrokenPipeError:
        streams.give_up_output()
        return _PIPE_CLOSED
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # a full disk, say
            streams.give_up_output()
        return BAD_INPUT


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if argv[0] in ("--version", "-V", "version"):
        from latentkv.version import version

        print(f"latentkv {version()}")
        return 0
    if argv[0] not in commands():
        raise expected("latentkv", f"a command ({', '.join(commands())})", repr(argv[0]), _hint(argv))
    if argv[1:] in (["--version"], ["-V"]):
        return _dispatch(["--version"])
    module = importlib.import_module(f"{__name__}.{argv[0]}")
    status: int = module.main(argv[1:])
    return status


def _hint(argv: list[str]) -> str:
    """What was meant, where that can be told."""
    if argv[0].startswith("-") or argv[0].endswith(".gguf"):
        return f"write latentkv chat {argv[0]} …, or serve in place of chat"
    name = argv[0].removeprefix("llama-")
    meant = _ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, commands(), 1)), "")
    return meant and f"write latentkv {meant}"


def _usage() -> str:
    width = max(len(name) for name in commands())
    lines = [
        "usage: latentkv COMMAND …",
        "",
        "Runs GGUF models with a small KV cache.",
        "",
        "  latentkv chat -m model.gguf --kv small             any GGUF: 30 % of f16 in long contexts",
        "  latentkv convert model.gguf -o smaller.gguf        once: a cache of 14 %",
        "",
    ]
    for name in commands():
        doc = importlib.import_module(f"{__name__}.{name}").__doc__ or ""
        lines.append(f"  {name:<{width}}  {doc.strip().splitlines()[0]}")
    return "\n".join([*lines, "", "latentkv COMMAND --help says more; latentkv --version"])
