"""The interactive loop: read a line, run a /command or ask the model."""

from __future__ import annotations

from latentkv.cli._console import Console
from latentkv.cli._conversation import Conversation
from latentkv.cli._errors import ABORTED, one_line
from latentkv.cli._input import Command, reader
from latentkv.console.printable import printable
from latentkv.errors import expected
from latentkv.quantities import bytes_text
from latentkv.text import utf8

_REGIONS = {  # as people call them
    "sink": "first tokens, exact",
    "recent": "latest tokens, exact",
    "middle": "all others",
    "ring": "sliding windows",
}


class Repl:
    """Runs until /exit, Ctrl-D, or Ctrl-C twice at the prompt. Errors end a turn, not the program."""

    def __init__(self, conversation: Conversation, console: Console) -> None:
        self._conversation = conversation
        self._console = console
        self._open = True
        self._commands = {
            "/reset": Command(self._reset, "", "forget the conversation"),
            "/system": Command(self._system, "TEXT", "set the system message (no text: show it)"),
            "/regen": Command(self._regen, "", "answer the last question again"),
            "/save": Command(self._save, "FILE", "save the conversation with its cache"),
            "/load": Command(self._load, "FILE", "continue a saved conversation"),
            "/stats": Command(self._stats, "", "context, cache bytes, what runs where"),
            "/help": Command(self._help, "", "this list"),
            "/exit": Command(self._exit, "", "exit (or Ctrl-D)"),
        }
        self._read = reader(self._commands, console)

    def run(self) -> int:
        model = self._conversation.llama.metadata.get("general.name", self._conversation.llama.model_path)
        self._console.note(f"{printable(model)} | {self._conversation.used()} | /help lists the commands")
        interrupted = False
        while self._open:
            try:
                line = self._read()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if interrupted:
                    return ABORTED
                interrupted = True
                self._console.note("press Ctrl-C again or Ctrl-D to exit")
                continue
            except UnicodeDecodeError as error:
                got = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
                self._refuse(expected("prompt", "UTF-8", got))
                continue
            interrupted = False
            try:
                utf8(line, "prompt")
                self._turn(line)
            except KeyboardInterrupt:
                self._console.note("(stopped)")
            except Exception as error:
                self._refuse(error)
        return 0

    def _refuse(self, error: Exception) -> None:
        said = one_line(error)
        if said is None:
            raise error
        self._console.warn(f"error: {said}")

    def _turn(self, line: str) -> None:
        if not line:
            return
        if line.startswith("/"):
            name, *rest = line.split(maxsplit=1)
            if name in self._commands:
                self._commands[name].run("".join(rest))
            else:
                self._console.warn(f"unknown command {name}; the commands are {' '.join(self._commands)}")
        elif self._conversation.fits(line):
            self._conversation.ask(line)
        else:
            self._console.warn(self._conversation.full())

    def _reset(self, rest: str) -> None:
        self._conversation.reset()
        self._console.note(f"conversation forgotten | {self._conversation.used()}")

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = rest
        self._console.note(f"system message: {self._conversation.system or '(none)'}")

    def _regen(self, rest: str) -> None:
        self._conversation.again()

    def _save(self, rest: str) -> None:
        if self._wants_file("/save", rest):
            self._conversation.save(rest)
            self._console.note(f"saved {len(self._conversation.turns)} messages with their cache to {rest}")

    def _load(self, rest: str) -> None:
        if self._wants_file("/load", rest):
            self._conversation.load(rest)
            self._console.note(
                f"loaded {len(self._conversation.turns)} messages | {self._conversation.used()}"
            )

    def _wants_file(self, name: str, rest: str) -> bool:
        if not rest:
            self._console.warn(f"{name} expected a file name; got none")
        return bool(rest)

    def _stats(self, rest: str) -> None:
        llama = self._conversation.llama
        kv = llama.kv_bytes()
        lines = [
            self._conversation.figures(),
            f"cache {bytes_text(kv['total'])} allocated: K {bytes_text(kv['k'])}, V {bytes_text(kv['v'])}, "
            f"positions {bytes_text(kv['cells'])}; "
            f"{kv['per_token']:.0f} bytes per token ({kv['f16_per_token']:.0f} in f16)",
            *(
                [
                    f"states of recurrent layers {bytes_text(kv['states'])}, "
                    f"and {bytes_text(kv['snapshots'])} of copies to go back to, at most "
                    f"{bytes_text(kv['snapshots_most'])}"
                ]
                if kv["states"]
                else []
            ),
            *(
                f"  {_REGIONS.get(r['name'], r['name'])}: {r['slots']} tokens, {bytes_text(r['k'] + r['v'])}"
                for r in kv["regions"]
            ),
            f"attention: {llama.session.implementations['latent_attn']}",
        ]
        self._console.note("\n".join(lines))

    def _help(self, rest: str) -> None:
        for name, command in self._commands.items():
            self._console.note(f"  {name + ' ' + command.argument:<14} {command.meaning}")
        self._console.note(
            "  Alt-Enter, or a backslash at the end of a line, adds a line; Ctrl-C stops an answer"
        )

    def _exit(self, rest: str) -> None:
        self._open = False
