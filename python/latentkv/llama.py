"""`Llama`: one model with one cache, under llama-cpp-python's names. This file holds the state; the verbs
have their own files."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentkv import _core, compat
from latentkv.chat import create_chat_completion
from latentkv.completion import create_completion
from latentkv.errors import expected
from latentkv.formats import format_name
from latentkv.generation import generate, sample
from latentkv.sampling import RANDOM_SEED
from latentkv.state import LlamaState, load_state, save_state
from latentkv.template import ChatTemplate, template_of
from latentkv.timings import Timings

SEQ = 0  # the only sequence this class uses


class Llama:
    """A GGUF model and its cache.

    `n_ctx` counts tokens (512 as in llama-cpp-python; 0 = the trained context); `n_batch` tokens go to native
    code per call and `n_ubatch` through the graph at once. Cache: `kv` is one row format for K and V ("" =
    the file's plan, else f16), `kv_k`/`kv_v` override a side, `type_k`/`type_v` are llama-cpp-python's names
    for the same, as format names or ggml type numbers; `sink`/`recent` count exact tokens (-1 = the file's
    default); `require_fused` turns a slower implementation into an error. `chat_format` names a built-in
    template, `chat_template` is one (Jinja); without them the file's own is used. Arguments of
    llama-cpp-python that have no meaning here are accepted at their neutral value and refused, with the
    reason, at any other.

    The cache is reused: a prompt that begins like the tokens already cached computes only the rest.
    """

    def __init__(
        self,
        model_path: str,
        *,
        n_gpu_layers: int = 0,
        vocab_only: bool = False,
        use_mmap: bool = True,
        seed: int = RANDOM_SEED,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        logits_all: bool = False,
        last_n_tokens_size: int = 64,
        chat_format: str | None = None,
        chat_template: str | None = None,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        kv: str = "",
        kv_k: str = "",
        kv_v: str = "",
        kv_rotate: bool = True,
        sink: int = -1,
        recent: int = -1,
        implementation: str = "fused",
        require_fused: bool = False,
        n_seq_max: int = 1,
        verbose: bool = False,
        **llama_cpp: Any,
    ) -> None:
        compat.check(llama_cpp)
        if n_ctx < 0:
            raise expected("n_ctx", "a number of tokens, or 0 for the trained context", n_ctx)
        if n_batch < 1 or n_ubatch < 1:
            raise expected("n_batch", "n_batch and n_ubatch of at least 1", f"{n_batch} and {n_ubatch}")
        _core.set_log_level(2 if verbose else 1)
        self.model_path = str(model_path)
        self.n_batch = n_batch
        self.last_n_tokens_size = last_n_tokens_size
        self.verbose = verbose
        self.timings = Timings()
        self._seed = RANDOM_SEED if seed == -1 else seed
        self._logits_all = logits_all
        self._tokens: list[int] = []
        self._logits: NDArray[np.float32] | None = None  # of the last evaluated token, [n_vocab]
        self._mark: tuple[int, NDArray[np.float32]] | None = (
            None  # tokens and logits at the last prompt's end
        )
        self._scores: NDArray[np.float32] | None = None  # logits_all: of every cached token, [n_ctx, n_vocab]
        self._session: _core.Session | None = None
        self._model: _core.Model | None = _core.Model(
            self.model_path, n_gpu_layers=n_gpu_layers, use_mmap=use_mmap, vocab_only=vocab_only
        )
        self._template: ChatTemplate | None = None
        self._template_choice = (chat_format, chat_template)
        if not vocab_only:
            self._session = _core.Session(
                self._model,
                n_ctx=n_ctx,
                n_ubatch=min(n_ubatch, n_batch),
                n_seq_max=n_seq_max,
                n_threads=n_threads or 0,
                n_threads_batch=n_threads_batch or n_threads or 0,
                kv=kv,
                kv_k=compat.one_of("kv_k", kv_k, "type_k", format_name(type_k, "type_k")),
                kv_v=compat.one_of("kv_v", kv_v, "type_v", format_name(type_v, "type_v")),
                kv_rotate=kv_rotate,
                sink=sink,
                recent=recent,
                implementation=implementation,
                require_fused=require_fused,
            )

    # The verbs.
    generate = generate
    sample = sample
    create_completion = create_completion
    __call__ = create_completion
    create_chat_completion = create_chat_completion
    save_state = save_state
    load_state = load_state

    # What is open.

    @property
    def model(self) -> _core.Model:
        """Weights and vocabulary."""
        if self._model is None:
            raise expected("Llama", "an open model", "a closed one")
        return self._model

    @property
    def session(self) -> _core.Session:
        """Cache and graph."""
        if self._session is None:
            raise expected("Llama", "an open model with weights", "a closed one, or vocab_only=True")
        return self._session

    def close(self) -> None:
        """Frees cache and weights; calling it again does nothing."""
        self._session = self._model = None
        self._logits = self._scores = None

    def __enter__(self) -> Llama:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_session"):
            self.close()

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

    def kv_bytes(self) -> dict[str, Any]:
        """Bytes that the cache allocated: total, k, v, cells, per_token, f16_per_token and the regions."""
        return self.session.kv_bytes()

    @property
    def chat_template(self) -> ChatTemplate:
        """The template in use; ChatML, with a warning, when the file has none."""
        if self._template is None:
            self._template = template_of(self.model, *self._template_choice)
        return self._template

    # What is cached.

    @property
    def n_tokens(self) -> int:
        """Tokens in the cache. Setting a smaller number forgets the ones behind it."""
        return len(self._tokens)

    @n_tokens.setter
    def n_tokens(self, count: int) -> None:
        if not 0 <= count <= len(self._tokens):
            raise expected("n_tokens", f"0 … {len(self._tokens)}", count)
        self.truncate(count)

    @property
    def input_ids(self) -> NDArray[np.intc]:
        """The cached tokens, [n_tokens]."""
        return np.array(self._tokens, dtype=np.intc)

    @property
    def eval_tokens(self) -> list[int]:
        return list(self._tokens)

    @property
    def logits(self) -> NDArray[np.float32]:
        """Logits after the last evaluated token, [n_vocab]."""
        if self._logits is None:
            raise expected(
                "logits", "an evaluated token", "none since the last change of the cache", "call eval()"
            )
        return self._logits

    @property
    def has_logits(self) -> bool:
        return self._logits is not None

    @property
    def scores(self) -> NDArray[np.float32]:
        """Logits of every cached token, [n_tokens, n_vocab]."""
        if self._scores is None:
            raise expected(
                "scores", "Llama(…, logits_all=True) and an evaluated token", f"logits_all={self._logits_all}"
            )
        return self._scores[: len(self._tokens)]

    @property
    def eval_logits(self) -> list[list[float]]:
        rows: list[list[float]] = (self.scores if self._logits_all else self.logits[np.newaxis]).tolist()
        return rows

    # Changing it.

    def eval(self, tokens: Sequence[int]) -> None:
        """Runs `tokens` behind the cached ones. Raises when they do not fit; an interrupted call keeps what
        is computed."""
        self.require_room(len(tokens))
        for start in range(0, len(tokens), self.n_batch):
            batch = tokens[start : start + self.n_batch]
            last = start + len(batch) == len(tokens)
            before = len(self._tokens)
            logits = self._decode(batch, "all" if self._logits_all else "last" if last else "none")
            if self._logits_all:
                if self._scores is None:
                    self._scores = np.empty((self.n_ctx(), self.n_vocab()), np.float32)
                self._scores[before : before + len(batch)] = logits
            if last:
                self._logits = np.array(logits[-1])

    def eval_all(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """eval() that returns the logits of all `tokens`, [len(tokens), n_vocab]."""
        self.require_room(len(tokens))
        starts = range(0, len(tokens), self.n_batch)
        rows = np.concatenate([self._decode(tokens[i : i + self.n_batch], "all") for i in starts])
        self._logits = np.array(rows[-1])
        return rows

    def _decode(self, batch: Sequence[int], output: str) -> NDArray[np.float32]:
        self._logits = None
        self._tokens += [int(token) for token in batch]
        try:
            return self.session.decode(self._tokens[-len(batch) :], output=output)
        finally:
            # The cache knows how far an interrupted or failed batch came.
            del self._tokens[self.session.seq_pos_max(SEQ) + 1 :]

    def reuse_prefix(self, tokens: Sequence[int]) -> int:
        """Forgets what `tokens` do not begin with; returns how many of them the cache holds, at most all but
        one.

        The last token is always left to compute unless its logits are still at hand: those of the cache's end
        and those of the last prompt are.
        """
        common = self.longest_token_prefix(self._tokens, tokens)
        if self._mark is not None and common == len(tokens) == self._mark[0]:
            self.truncate(common)
            self._logits = self._mark[1]
            return common
        if common == len(tokens) == len(self._tokens) and self.has_logits:
            return common
        self.truncate(min(common, len(tokens) - 1))
        return len(self._tokens)

    def mark_prompt(self) -> None:
        """Keeps the logits at the prompt's end. The same prompt again then starts from the same numbers:
        computed anew they would differ in the last bits, as its tokens go through in other pieces, and a
        coarse cache amplifies that."""
        self._mark = (len(self._tokens), self.logits)

    def truncate(self, count: int) -> None:
        """Keeps the first `count` cached tokens; a cache that cannot forget a part forgets all."""
        if count == len(self._tokens):
            return
        self._logits = None
        if not self.session.seq_rm(SEQ, count, -1):
            self.session.seq_rm(SEQ)
            count = 0
        del self._tokens[count:]
        if self._mark is not None and count < self._mark[0]:
            self._mark = None

    def restore(self, state: LlamaState) -> None:
        """Replaces the cache by a saved one."""
        self._tokens, self._logits, self._mark = [], None, None
        try:
            self.session.set_state(state.cache)
        except BaseException:
            self.session.clear()
            raise
        if self.session.seq_pos_max(SEQ) + 1 != state.n_tokens:
            cached = self.session.seq_pos_max(SEQ) + 1
            self.session.clear()
            raise expected("state", f"a cache of {state.n_tokens} tokens, as its token list has", cached)
        self._tokens = list(state.input_ids)
        self._logits = None if state.logits is None else state.logits.copy()
        self._seed = state.seed

    def require_room(self, count: int) -> None:
        if len(self._tokens) + count > self.n_ctx():
            raise expected(
                "context",
                f"at most {self.n_ctx()} tokens",
                f"{len(self._tokens)} cached and {count} new",
                "raise -c / n_ctx",
            )

    def reset(self) -> None:
        """Empties the cache."""
        self.truncate(0)

    def set_seed(self, seed: int) -> None:
        """The seed of calls that bring none; -1 draws one each time."""
        self._seed = RANDOM_SEED if seed == -1 else seed

    @property
    def seed(self) -> int:
        return self._seed

    # What llama-cpp-python has and this runtime does not.

    def embed(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise expected("embed", "a call that generates text", "embed()", "this runtime computes logits only")

    create_embedding = embed

    def set_cache(self, cache: object) -> None:
        """Only None: the previous call's prefix is always reused, other calls' are not kept."""
        if cache is not None:
            raise expected(
                "set_cache", "None", type(cache).__name__, "keep a prompt with save_state() instead"
            )

    @staticmethod
    def logits_to_logprobs(logits: NDArray[np.float32], axis: int = -1) -> NDArray[np.float64]:
        """Natural logarithm of softmax(logits) in float64, same shape."""
        shifted = np.subtract(logits, np.max(logits, axis=axis, keepdims=True), dtype=np.float64)
        return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """How many tokens both begin with."""
        count = 0
        for x, y in zip(a, b, strict=False):
            if x != y:
                break
            count += 1
        return count
