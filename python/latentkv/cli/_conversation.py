"""A conversation: its messages, its answers on the console, and what each cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latentkv.cli._console import Console
from latentkv.cli._errors import ABORTED
from latentkv.errors import expected
from latentkv.generate.chat import chat_prompt
from latentkv.llama import Llama
from latentkv.quantities import bytes_text


class Conversation:
    """Messages so far and how to answer the next one."""

    def __init__(
        self,
        llama: Llama,
        console: Console,
        *,
        system: str,
        max_tokens: int,
        stop: list[str],
        seed: int,
        sampling: dict[str, Any],
        template: dict[str, Any],
        thoughts: dict[str, Any],
    ) -> None:
        self.llama = llama
        self.system = system
        self.turns: list[dict[str, str]] = []
        self._console = console
        self._seed = seed
        self._chat = {"chat_template_kwargs": template, **thoughts}
        self._is_cut = False  # the last answer, by its length
        self._options = {"max_tokens": max_tokens, "stop": stop, "stream": True, **sampling}

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def ask(self, text: str) -> None:
        """One turn. Ctrl-C keeps what was said so far; an error takes the question back."""
        self.turns.append({"role": "user", "content": text})
        try:
            self._answer()
        except Exception:
            self.turns.pop()
            raise

    def again(self) -> None:
        """Answers the last question anew. A fixed seed moves on by one, or the text would be the same."""
        if not self.turns:
            raise expected("/regen", "a question to answer again", "none yet")
        if self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        if self._seed >= 0:
            self._seed += 1
        self._answer()

    def answer_once(self, text: str) -> int:
        """One question, one answer, exit status."""
        self.turns.append({"role": "user", "content": text})
        return ABORTED if self._answer() else 0

    def complete(self, text: str) -> int:
        """Continues plain text; exit status."""
        chunks = self.llama.create_completion(text, seed=self._seed, **self._options)
        _, interrupted = self._show(chunk["choices"][0] for chunk in chunks)
        return ABORTED if interrupted else 0

    def reset(self) -> None:
        self.turns.clear()
        self.llama.reset()

    def save(self, path: str) -> None:
        """Messages and cache to a file."""
        self.llama.save_state(Path(path).expanduser(), extra={"system": self.system, "turns": self.turns})

    def load(self, path: str) -> None:
        extra = self.llama.load_state(Path(path).expanduser()).extra
        if "turns" not in extra:
            raise expected("/load", "a conversation saved with /save", "a state without messages")
        self.system, self.turns = extra["system"], list(extra["turns"])

    def used(self) -> str:
        """Tokens in the context and bytes of the cache behind them."""
        llama, kv = self.llama, self.llama.kv_bytes()
        cell = kv["cells"] / sum(region["slots"] for region in kv["regions"])
        used = sum(r["used"] * ((r["k"] + r["v"]) / r["slots"] + cell) for r in kv["regions"]) + kv["states"]
        held = {region["name"]: region["used"] for region in kv["regions"]}
        exact = sum(held.values()) - held["middle"]
        exactly = f", {exact} exact" if held["middle"] and "recent" in held else ""
        return (
            f"context {llama.n_tokens}/{llama.n_ctx()} tokens{exactly} | "
            f"KV {bytes_text(used)} of {bytes_text(kv['total'])}"
        )

    def _answer(self) -> bool:
        """Streams the answer to the last turn and keeps it; whether Ctrl-C cut it."""
        chunks = self.llama.create_chat_completion(
            self.messages, seed=self._seed, **self._chat, **self._options
        )
        text, interrupted = self._show(
            {**chunk["choices"][0], "text": chunk["choices"][0]["delta"].get("content", "")}
            for chunk in chunks
        )
        if text or not interrupted:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()
        return interrupted

    def _show(self, choices: Iterator[dict[str, Any]]) -> tuple[str, bool]:
        parts: list[str] = []
        reason, interrupted = None, False
        try:
            for choice in choices:
                parts.append(choice["text"])
                self._console.write(choice["text"])
                reason = choice["finish_reason"] or reason
        except KeyboardInterrupt:
            interrupted = True
        if not parts or not "".join(parts).endswith("\n"):
            self._console.write("\n")
        if interrupted:
            self._console.note("(stopped)")
        elif reason == "length" and self.llama.n_tokens + 1 >= self.llama.n_ctx():
            self._console.warn(self.full())
        self._is_cut = reason == "length"
        if not self._console.quiet:
            self._console.note(self.figures())
        return "".join(parts), interrupted

    def full(self) -> str:
        return (
            f"the context of {self.llama.n_ctx()} tokens is full: /reset starts over, "
            f"a larger -c (now {self.llama.n_ctx()}) makes room"
        )

    def figures(self) -> str:
        """One line after each turn."""
        t = self.llama.timings.as_dict()
        cached = f", {t['cached_n']} cached" if t["cached_n"] else ""
        n = t["predicted_n"] + self._is_cut  # the last token of an answer that is cut is drawn, not computed
        return (
            f"prompt {t['prompt_per_second']:.1f} t/s ({t['prompt_n']} tokens{cached}) | "
            f"answer {t['predicted_per_second']:.1f} t/s ({n} tokens) | {self.used()}"
        )

    def fits(self, text: str) -> bool:
        """Whether the next question leaves room for an answer."""
        messages = [*self.messages, {"role": "user", "content": text}]
        return len(chat_prompt(self.llama, messages)) < self.llama.n_ctx()
