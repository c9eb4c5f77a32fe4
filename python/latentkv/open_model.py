"""What is open: a model with its vocabulary and template, and one cache. `Llama`'s verbs need no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentkv.chat.template import ChatTemplate, template_of
from latentkv.errors import LatentKVError, NoAttribute, absent, expected
from latentkv.sampling.options import RANDOM_SEED
from latentkv.sampling.speculative import DraftModel
from latentkv.session.evaluator import Evaluator
from latentkv.session.pooling import POOLINGS, chosen
from latentkv.session.prefix import Window, common
from latentkv.session.prompt_cache import BaseLlamaCache
from latentkv.session.state import LlamaState
from latentkv.session.turns import in_turn

if TYPE_CHECKING:
    from latentkv import _core


class OpenModel(Evaluator):
    """An evaluator of tokens that knows what they mean."""

    model_path: str
    last_n_tokens_size: int  # tokens that penalties see, where a call does not say
    draft_model: DraftModel | None = None
    spm_infill: bool = False

    def __init__(
        self,
        model: _core.Model,
        session: _core.Session | None,
        n_batch: int,
        logits_all: bool,
        window: Window,
        reopen: Callable[[], _core.Session] | None = None,
    ) -> None:
        self._model: _core.Model | None = model
        self._seed = RANDOM_SEED
        self._template: ChatTemplate | None = None
        self._template_choice: tuple[str | None, str | None] = (None, None)  # a built-in one's name, a source
        self._pooling: str | None = None  # None: the file's
        self.cache: BaseLlamaCache | None = None
        super().__init__(session, n_batch, logits_all, window, reopen)

    @property
    def model(self) -> _core.Model:
        """Weights and vocabulary."""
        if self._model is None:
            raise absent("Llama", "an open model", "a closed one")
        return self._model

    # Vocabulary.

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """UTF-8 bytes to token ids. `add_bos` adds what the file asks for; `special` parses special-token
        text."""
        if isinstance(text, str):
            raise expected("tokenize", "bytes", "str", 'call text.encode("utf-8")')
        return list(self.model.tokenize(text, add_bos, special))

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Token ids to UTF-8 bytes; with `prev_tokens`, what `tokens` add after them. `special` shows special
        tokens."""
        if prev_tokens is None:
            return self.model.detokenize(list(tokens), special)
        return b"".join(self.model.token_to_piece(token, special) for token in tokens)

    def tokenizer(self) -> _core.Model:
        """The object with tokenize() and detokenize()."""
        return self.model

    def token_bos(self) -> int:
        return self.model.token_bos()

    def token_eos(self) -> int:
        return self.model.token_eos()

    def token_nl(self) -> int:
        return self.model.token_nl()

    # Sizes.

    def n_ctx(self) -> int:
        return self.session.n_ctx

    def n_embd(self) -> int:
        return self.model.n_embd

    def n_vocab(self) -> int:
        return self.model.n_vocab

    @property
    def metadata(self) -> dict[str, str]:
        """The GGUF keys, as text."""
        return {key: str(value) for key, value in self.model.metadata.items()}

    @in_turn
    def kv_bytes(self) -> dict[str, Any]:
        """Bytes that the cache allocated: total, k, v, cells, per_token, f16_per_token and the regions."""
        return self.session.kv_bytes()

    @property
    def chat_template(self) -> ChatTemplate:
        """The template in use; ChatML, with a warning, when the file has none."""
        if self._template is None:
            try:
                self._template = template_of(self.model, *self._template_choice)
            except LatentKVError as error:
                raise NoAttribute(str(error)) from error
        return self._template

    def pooling_type(self) -> int:
        """How embed() makes one vector of a text: llama.cpp's number, an index of POOLINGS."""
        return POOLINGS.index(chosen(self._pooling, self.model.metadata))

    def set_seed(self, seed: int) -> None:
        """The seed of calls that bring none; -1 draws one each time."""
        self._seed = RANDOM_SEED if seed == -1 else seed

    @property
    def seed(self) -> int:
        return self._seed

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Where completions keep what they computed, and look for what begins like their prompts. Without
        one (None) the previous call's prefix alone is reused. A cache belongs to one model and its cache
        formats."""
        self.cache = cache

    def recall(self, prompt: Sequence[int]) -> None:
        """Puts the kept state that has more of the prompt than the cache does in its place. For who holds
        it."""
        if self.cache is None or prompt not in self.cache:
            return
        state = self.cache[prompt]
        if common(state.input_ids, list(prompt)) > common(self.eval_tokens, list(prompt)):
            self.restore(state)

    def remember(self) -> None:
        """Keeps what the cache holds now."""
        if self.cache is not None:
            self.cache[self.eval_tokens] = self.save_state()

    @in_turn
    def save_state(self, path: str | Path | None = None, extra: dict[str, Any] | None = None) -> LlamaState:
        """A copy of the cache and of what belongs to it; with `path`, also written there."""
        state = LlamaState(
            input_ids=self.eval_tokens,
            cache=self.session.state_bytes(),
            logits=self.logits.copy() if self.has_logits else None,
            seed=self.seed,
            extra=dict(extra or {}),
        )
        if path is not None:
            state.write(path)
        return state

    @in_turn
    def load_state(self, state: LlamaState | str | Path) -> LlamaState:
        """Goes on from a state (or the file of one) that the same model saved; returns it. Rows of other
        formats, budgets or exact windows are coded anew, and what they lose is said in one line."""
        if not isinstance(state, LlamaState):
            state = LlamaState.read(state)
        self.hold(None)
        self.restore(state, "any")
        self.set_seed(state.seed)
        return state
