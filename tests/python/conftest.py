"""Fixtures: a scripted runtime for pure logic, and two conversions of the demo model for the rest."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latentkv import processor
from latentkv.errors import expected

NATIVE = bool(processor.built())

END = 0  # the scripted vocabulary's end token; token b + 1 is byte b


@dataclass
class Script:
    """What the scripted model says after a prompt, whatever was sampled: tokens, each by far the
    likeliest."""

    tokens: list[int] = field(default_factory=list)
    pieces: dict[int, bytes] = field(default_factory=dict)  # tokens of more than one byte
    decoded: list[int] = field(default_factory=list)  # every token that went through decode()
    prompt: int = 0  # tokens before the script starts
    infill: tuple[int, int, int] = (-1, -1, -1)  # tokens before a prefix, a suffix and a gap

    def say(self, prompt: int, *pieces: bytes) -> None:
        """The answer as pieces, one token each, then the end token."""
        self.prompt, self.tokens = prompt, []
        for piece in pieces:
            token = piece[0] + 1 if len(piece) == 1 else 300 + len(self.pieces)
            if len(piece) != 1:
                self.pieces[token] = piece
            self.tokens.append(token)
        self.tokens.append(END)


def scripted_core(script: Script) -> types.SimpleNamespace:
    n_vocab = 400

    class Model:
        n_embd, n_ctx_train, chat_template, regions = 8, 4096, None, {"sink": 0, "recent": 0}
        metadata: dict[str, str] = {}  # noqa: RUF012

        def __init__(self, path: str, **options: Any) -> None:
            self.n_vocab = n_vocab

        def tokenize(self, text: bytes, add_special: bool = True, parse_special: bool = False) -> list[int]:
            return [byte + 1 for byte in text]

        def token_to_piece(self, token: int, special: bool = False) -> bytes:
            return b"" if token == END else script.pieces.get(token, bytes([(token - 1) % 256]))

        def detokenize(self, tokens: Sequence[int], special: bool = False) -> bytes:
            return b"".join(self.token_to_piece(token) for token in tokens)

        def token_bos(self) -> int:
            return -1

        def token_eos(self) -> int:
            return END

        def token_prefix(self) -> int:
            return script.infill[0]

        def token_suffix(self) -> int:
            return script.infill[1]

        def token_middle(self) -> int:
            return script.infill[2]

        def add_bos(self) -> bool:
            return False

        def is_eog(self, token: int) -> bool:
            return token == END

        def find_token(self, text: str) -> int:
            return -1

    class Session:
        def __init__(self, model: Model, *, n_ctx: int = 0, **options: Any) -> None:
            self.prefill, self.can_rotate = "eager", False
            self.rewinds, self.evict = True, "none"
            self.n_ctx, self.cells = n_ctx, []  # type: ignore[var-annotated]

        def decode(self, tokens: Sequence[int], *, output: str = "last", **options: Any) -> np.ndarray:
            rows = np.zeros((len(tokens), n_vocab), np.float32)
            for row, token in zip(rows, tokens, strict=True):
                self.cells.append(token)
                script.decoded.append(token)
                at = len(self.cells) - script.prompt
                row[script.tokens[at] if 0 <= at < len(script.tokens) else END] = 20.0
            if take := options.get("take"):
                take(rows)
                return rows[:0]
            return {"all": rows, "last": rows[-1:], "none": rows[:0]}[output]

        def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
            del self.cells[max(p0, 0) :]
            return True

        def kv_bytes(self) -> dict[str, Any]:
            return {"regions": [{"name": "middle"}]}

        def n_recent(self, length: int) -> int:
            return 0

        def seq_pos_max(self, seq: int) -> int:
            return len(self.cells) - 1

        def require_room(self, n: int) -> None:
            if 0 < self.n_ctx < len(self.cells) + n:
                wanted, got = f"at most {self.n_ctx} cells", f"{len(self.cells) + n}"
                raise expected("context", wanted, got, "raise -c / n_ctx")

        def state_bytes(self) -> bytes:
            return np.array(self.cells, np.int32).tobytes()

        def set_state(self, data: bytes, accept: str = "same") -> None:
            self.cells = np.frombuffer(data, np.int32).tolist()

    class Sampler:
        def __init__(self, model: Model, **options: Any) -> None:
            self.options = options

        def sample(self, logits: np.ndarray) -> int:
            return int(logits.argmax())

        def accept(self, token: int, in_grammar: bool = True) -> None: ...

    def chat_templates(model: Model, source: str, **tokens: str) -> Any:
        if not NATIVE:
            pytest.skip("needs the native module (pip install .)")
        from latentkv import _core

        return _core.ChatTemplates(None, source, **tokens)  # the scripted model has no vocabulary

    return types.SimpleNamespace(
        ChatTemplates=chat_templates,
        Model=Model,
        Session=Session,
        Sampler=Sampler,
        set_log_level=lambda level: None,
        Error=ValueError,
    )


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Replaces the native runtime by one that says what the test wants. Needs no native module."""
    written = Script()
    core = scripted_core(written)
    if not NATIVE:
        sys.modules.setdefault("latentkv._core", core)  # type: ignore[arg-type]
    rooms = ("latentkv.llama", "latentkv.open_model", "latentkv.sampling.options", "latentkv.chat.template")
    for name in rooms:
        monkeypatch.setattr(importlib.import_module(name), "_core", core)
    return written


@pytest.fixture
def scripted(script: Script) -> Callable[..., Any]:
    """Builds a Llama on the scripted runtime."""

    def build(**options: Any) -> Any:
        from latentkv import Llama

        return Llama("scripted.gguf", **options)

    return build


@pytest.fixture(scope="session")
def plain_gguf(converted: Callable[..., Path]) -> Path:
    """models/demo with full K and V, f32."""
    return converted("--method", "none", "--outtype", "f32")


@pytest.fixture(scope="session")
def latent_gguf(converted: Callable[..., Path]) -> Path:
    """models/demo with latent K and V at half the dimensions, f16."""
    return converted("--method", "palu", "--keep", "0.5", "--allocate", "uniform")


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run() -> Run:
    """`run("info", path, input="…")`: the command as a user's shell would start it."""

    def start(*args: object, input: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "latentkv", *map(str, args)],
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return start
