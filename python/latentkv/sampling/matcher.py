"""What an answer has to match, token by token, by llguidance (github.com/guidance-ai/llguidance).

Its Earley parser says in some 10 us whether a drawn token may come, and in some 0.1 ms which tokens may: so
the native sampler draws first, and asks for all only where a token was refused.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakKeyDictionary, ref

from latentkv.errors import expected
from latentkv.sampling.library import llguidance

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from latentkv import _core

# A step that takes 50 ms of one core ends with an error: all answers of a server wait for it.
_MOST_ITEMS, _MOST_IN_ROW, _LEXER_FUEL = 1_000_000, 10_000, 500_000
_lock = threading.Lock()
_tokenizers: WeakKeyDictionary[_core.Model, LLTokenizer] = WeakKeyDictionary()


class TokenMatcher:
    """Follows one answer. The native Sampler calls its methods (`matcher` in _core.pyi)."""

    def __init__(self, start: LLMatcher, ends: frozenset[int], where: str) -> None:
        """start: at the begin of the answer; it stays as it is."""
        self._start, self._ends, self._where = start, ends, where
        self._now = start.deep_copy()
        self._forced: deque[int] = deque()  # the next tokens, as far as they are known

    def allows(self, token: int) -> bool:
        if self._now.is_stopped():
            return token in self._ends and not self._now.is_error()
        return bool(self._now.validate_tokens([token]))

    def allowed(self) -> bytes:
        """A bit for each token, set if it may come next; the first tokens are in the lowest bits. Where one
        text alone may come, it comes in the tokens that the vocabulary makes of it."""
        if not self._forced:
            self._now.compute_ff_bytes()  # else there are no tokens of them
            self._forced = deque(self._now.compute_ff_tokens())
        bits = self._now.compute_bitmask()
        self._check()
        if not self._forced:
            return bits
        byte, bit = divmod(self._forced[0], 8)
        alone = bytearray(len(bits))
        alone[byte] = 1 << bit
        return bytes(alone)

    def accept(self, token: int) -> None:
        self._now.consume_token(token)
        if self._forced and self._forced.popleft() != token:
            self._forced.clear()
        self._check()

    def reset(self) -> None:
        self._now = self._start.deep_copy()
        self._forced.clear()

    def clone(self) -> TokenMatcher:
        copy = TokenMatcher(self._start, self._ends, self._where)
        copy._now, copy._forced = self._now.deep_copy(), self._forced.copy()
        return copy

    def _check(self) -> None:
        if self._now.is_error():
            refuse(self._where, self._now.get_error())


def started(model: _core.Model, grammar: str, prefix: Sequence[int], where: str) -> LLMatcher:
    """llguidance's matcher, advanced by the tokens of a prefix. Raises LatentKVError for a grammar that
    nothing matches, or that is too large."""
    library = llguidance()
    limits = library.LLParserLimits(
        max_items_in_row=_MOST_IN_ROW,
        step_max_items=_MOST_ITEMS,
        step_lexer_fuel=_LEXER_FUEL,
        verbose_errors=False,
    )
    matcher: LLMatcher = library.LLMatcher(tokenizer(model), grammar, log_level=0, limits=limits)
    if not matcher.is_error() and prefix:
        matcher.consume_tokens(list(prefix))
    first = matcher.deep_copy()
    first.compute_bitmask()  # finds a grammar that nothing matches
    if first.is_error():
        refuse(where, first.get_error())
    return matcher


def refuse(where: str, error: str) -> NoReturn:
    """Raises LatentKVError with one line made of llguidance's several."""
    first = " ".join(re.split("<state>|<backtrace>|<non-verbose|; try", error)[0].split())[:200]
    if "Too many items" in first or "fuel" in first or "TooComplex" in first or "panic" in first:
        raise expected(where, "one that can be followed in 50 ms a token", first, "make it simpler")
    if "NoExtension" in first:
        first = "one that nothing matches"
    raise expected(where, "one that texts can match", first)


def ends_of(model: _core.Model) -> frozenset[int]:
    """The tokens that end an answer."""
    return frozenset(tokenizer(model).eos_tokens)


def tokenizer(model: _core.Model) -> LLTokenizer:
    """The model's vocabulary as llguidance takes it: made once, in half a second for 150,000 tokens."""
    with _lock:
        if model not in _tokenizers:
            _tokenizers[model] = _tokenizer(model)
        return _tokenizers[model]


class _Vocabulary:
    """What LLTokenizer wants of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, model: _core.Model) -> None:
        self._model = ref(model)  # the tokenizer is kept as long as the model
        count = n_tokens(model)
        shown = [model.token_to_piece(token) for token in range(count)]
        self.ends = [token for token in range(count) if model.is_eog(token)]
        # those that an answer does not show: no text of a grammar is theirs
        self.special_token_ids = [token for token, piece in enumerate(shown) if not piece]
        self.special_token_ids += [token for token in self.ends if shown[token]]
        self.tokens = [piece or model.token_to_piece(token, True) for token, piece in enumerate(shown)]
        self.eos_token_id = self.ends[0] if self.ends else None

    def __call__(self, text: str | bytes) -> list[int]:
        model = self._model()
        assert model is not None
        return model.tokenize(text if isinstance(text, bytes) else text.encode(), False, False)


def n_tokens(model: _core.Model) -> int:
    """The size of the vocabulary, also of a model that was opened for it alone."""
    if model.n_vocab:
        return model.n_vocab
    listed = model.metadata.get("tokenizer.ggml.tokens", 0)
    return listed if isinstance(listed, int) else len(listed)


def _tokenizer(model: _core.Model) -> LLTokenizer:
    model.token_bos()  # raises for a file without a vocabulary
    vocabulary = _Vocabulary(model)
    made: LLTokenizer = llguidance().LLTokenizer(vocabulary, eos_token=vocabulary.ends or None)
    return made
