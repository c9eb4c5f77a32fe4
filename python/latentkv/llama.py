"""`Llama`: one model with one cache, under llama-cpp-python's names. Its verbs delegate: tokens to an
evaluator, answers to `generate/`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentkv import _core, compat, hub, ranges
from latentkv.chat.template import ChatTemplate, require_built_in, template_of
from latentkv.drafts.adaptive import with_own_layers
from latentkv.errors import LatentKVError, NoAttribute, absent, expected
from latentkv.generate.calls import OpenAICalls
from latentkv.generate.chat import openai_objects
from latentkv.generate.loop import next_token, tokens_after
from latentkv.generate.processors import LogitsProcessor, StoppingCriteria
from latentkv.open_model import open_model
from latentkv.plan.kv_budget import KvBudget
from latentkv.sampling.grammar import LlamaGrammar
from latentkv.sampling.logprobs import log_softmax
from latentkv.sampling.options import RANDOM_SEED, SamplingOptions
from latentkv.sampling.recommended import recommended
from latentkv.sampling.speculative import DraftModel
from latentkv.session.evaluator import Evaluator
from latentkv.session.lock import SessionLock, ShuttingDown, locked
from latentkv.session.pooling import POOLINGS, chosen, pooling_name
from latentkv.session.prefix import common
from latentkv.session.prompt_cache import BaseLlamaCache
from latentkv.session.state import LlamaState
from latentkv.session.timings import Timings
from latentkv.text import utf8


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The constructor's arguments by name, from its locals()."""
    named = {key: value for key, value in given.items() if key not in ("self", "llama_cpp", "__class__")}
    return named | given["llama_cpp"]


class Llama(OpenAICalls):
    """A GGUF model and its cache, with the interface of llama-cpp-python's Llama.

    Args:
        latent_path: a sidecar of the model: a file with the factors and the plan of a latent cache.
        use_mlock: keeps the weights in memory, as far as `ulimit -l` allows; a warning says if it does not.
        n_ctx: tokens of the cache (512 as in llama-cpp-python; 0 = the trained context).
        n_batch, n_ubatch: tokens per native call; tokens that pass through the graph together, 0 = 512,
            or 2048 where all layers are on GPUs that have the memory, and at most n_batch.
        kv: a preset ("balanced", "small", "smaller", "smallest": docs/cache.md), a row format for K and V, or
            a pair as "c4/q4"; "" = the file's plan, else f16. `kv_k` and `kv_v` set one of them. `type_k` and
            `type_v` are llama-cpp-python's names for the same, as format names or ggml type numbers.
        kv_budget: a new plan for a master file: "14%" of the f16 cache, or "2.5GiB@131072".
        n_gpu_layers: the last layers, which run on GPUs. It, `n_ctx` and `kv_budget` may be "auto": what fits
            in free memory. `fit` says what was chosen.
        weights: their type in memory: "stored" as in the file, or "f32" or "f16", which take more of it and
            round less of what they are multiplied with.
        tensor_split: each GPU's share of these layers (None = by free memory). `split_mode` 0 ("none") puts
            all of them on `main_gpu`.
        sink, recent: first and latest tokens that are kept exact. recent_ratio: the latest as a share of the
            sequence (-1 = as the file asks). `kv_sink` and `kv_recent` are their row formats ("" = the
            file's, else f16). fixed_window: exact are these alone; else others too, while there is room.
        kv_read: on a GPU, compressed tokens that a layer reads for a decoded token (0 = all).
        mtp: guesses tokens ahead by the file's own layers for that, or those in the GGUF at `mtp_path`, and
            by what the text repeats, in place of a draft_model.
        evict: a policy by which each layer evicts tokens: "h2o", "keyformer" or "snapkv". keep_tokens: what a
            layer keeps of a sequence, exact tokens included: a number, or "50%" of its context.
        prefill: "lazy": a prompt that starts the cache attends to exact K and V; "eager": to the compressed
            past; "" = as the file asks.
        require_fused: makes a slower implementation an error.
        chat_format, chat_template: a built-in template by name; a Jinja template. Default: the file's own.
        draft_model: guesses tokens ahead (LlamaPromptLookupDecoding), which are verified together.
        pooling_type: how embed() makes one vector of a text: "mean", "cls" (the first token's), "last",
            "none" (one per token), or llama.cpp's number for one of these (-1 = the file's, else none).
        spm_infill: puts the suffix of an infill first.
        last_n_tokens_size: tokens that penalties look at (None = as the file recommends, else 64).

    Arguments of llama-cpp-python that have no meaning here are accepted at their neutral value and refused,
    with the reason, at any other.

    What a call leaves open is drawn as the file recommends (`recommended`: its keys general.sampling.*),
    else with llama.cpp's defaults: temperature 0.8 (0.2 of a chat), top_k 40, top_p 0.95, min_p 0.05.

    A prompt that begins like the tokens in the cache computes only the rest. Threads may share an object:
    their calls take turns. You can make other calls while a stream is open; it resumes where it stopped, and
    its rows wait in memory meanwhile. Pickling keeps the arguments, not the cache.
    """

    __module__ = "latentkv"

    def __init__(
        self,
        model_path: str,
        *,
        latent_path: str | None = None,
        n_gpu_layers: int | str = 0,
        split_mode: int | str = 1,
        main_gpu: int = 0,
        tensor_split: Sequence[float] | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        weights: str = "stored",
        seed: int = RANDOM_SEED,
        n_ctx: int | str = 512,
        n_batch: int = 2048,
        n_ubatch: int = 0,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        logits_all: bool = False,
        last_n_tokens_size: int | None = None,
        chat_format: str | None = None,
        chat_template: str | None = None,
        draft_model: DraftModel | None = None,
        pooling_type: int | str = -1,
        spm_infill: bool = False,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        kv: str = "",
        kv_k: str = "",
        kv_v: str = "",
        kv_budget: str | KvBudget = "",
        kv_sink: str = "",
        kv_recent: str = "",
        kv_rotate: bool = True,
        sink: int = -1,
        recent: int = -1,
        recent_ratio: float = -1.0,
        fixed_window: bool = False,
        kv_read: int = 0,
        mtp: bool = False,
        mtp_path: str = "",
        evict: str = "",
        keep_tokens: int | str = "",
        prefill: str = "",
        implementation: str = "fused",
        require_fused: bool = False,
        n_seq_max: int = 1,
        verbose: bool = False,
        **llama_cpp: Any,
    ) -> None:
        self._arguments = _arguments(locals())
        compat.check(llama_cpp)
        require_built_in(chat_format)
        _core.set_log_level(2 if verbose else 1)
        self.model_path = str(model_path)
        utf8(self.model_path, "model_path")
        self.latent_path = None if latent_path is None else str(latent_path)
        utf8(self.latent_path or "", "latent_path")
        if last_n_tokens_size is not None:
            ranges.PENALTY_WINDOW.check("last_n_tokens_size", last_n_tokens_size)
        self.verbose = verbose
        if mtp and draft_model is not None:
            raise expected("mtp", "no draft_model beside it", "both")
        self.draft_model = draft_model
        self.spm_infill = spm_infill
        n_batch = ranges.N_BATCH.check("n_batch", n_batch)
        opened = open_model(self.model_path, self.latent_path or "", n_batch, self._arguments)
        self.fit = opened.fit
        self._model: _core.Model | None = opened.model
        self.recommended: Mapping[str, Any] = recommended(opened.model.metadata)
        usual = self.recommended.get("penalty_last_n", SamplingOptions.penalty_last_n)
        self.last_n_tokens_size: int = usual if last_n_tokens_size is None else last_n_tokens_size
        self.evaluator = Evaluator(opened.session, n_batch, logits_all, opened.reopen)
        if mtp and opened.session is not None:
            self.draft_model = with_own_layers(partial(getattr, self.evaluator, "session"))
        self.cache: BaseLlamaCache | None = None
        self._template: ChatTemplate | None = None
        self._template_choice = (chat_format, chat_template)  # a built-in one's name, a source
        self._pooling = None if pooling_type == -1 else pooling_name("pooling_type", pooling_type)
        self.set_seed(seed)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        *,
        local_dir: str | Path | None = None,
        cache_dir: str | Path | None = None,
        **options: Any,
    ) -> Llama:
        """Opens a GGUF of a repository on huggingface.co, downloaded once. `filename` is its name there, or a
        pattern that one file matches ("*Q4_K_M.gguf"); None takes Q4_K_M, else the first. `options` are the
        constructor's."""
        where: dict[str, Any] = {} if local_dir is None else {"local_dir": local_dir}
        path = hub.fetch(*hub.split_name(repo_id), filename or "", cache_dir=cache_dir, **where)
        return cls(str(path), **options)

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
        if not isinstance(text, bytes | bytearray | memoryview):
            hint = 'call text.encode("utf-8")' if isinstance(text, str) else ""
            raise expected("tokenize", "bytes", type(text).__name__, hint)
        return list(self.model.tokenize(bytes(text), add_bos, special))

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Token ids to UTF-8 bytes; with `prev_tokens`, what `tokens` add after them. `special` shows special
        tokens."""
        ids = ranges.token_ids("detokenize", tokens)
        if prev_tokens is None:
            return self.model.detokenize(ids, special)
        return b"".join(self.model.token_to_piece(token, special) for token in ids)

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

    @locked
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
        seed = ranges.SEED.check("seed", seed)
        self._seed = RANDOM_SEED if seed == -1 else seed

    @property
    def seed(self) -> int:
        return self._seed

    # What is cached, and the logits after it.

    @property
    def lock(self) -> SessionLock:
        """The lock of the session: its holder may use it."""
        return self.evaluator.lock

    @property
    def session(self) -> _core.Session:
        """Cache and graph."""
        return self.evaluator.session

    @property
    def timings(self) -> Timings:
        """Timings of the call that had the cache last."""
        return self.evaluator.timings

    @property
    def n_batch(self) -> int:
        """Tokens that go to native code in one call."""
        return self.evaluator.n_batch

    @property
    def n_tokens(self) -> int:
        """Tokens in the cache. Setting a smaller number forgets the ones after it."""
        return self.evaluator.n_tokens

    @n_tokens.setter
    def n_tokens(self, count: int) -> None:
        self.evaluator.n_tokens = count

    @property
    def input_ids(self) -> NDArray[np.intc]:
        """The cached tokens, [n_tokens]."""
        return self.evaluator.input_ids

    @property
    def eval_tokens(self) -> list[int]:
        return self.evaluator.eval_tokens

    @property
    def logits(self) -> NDArray[np.float32]:
        """Logits after the last evaluated token, [n_vocab]."""
        return self.evaluator.logits

    @property
    def has_logits(self) -> bool:
        return self.evaluator.has_logits

    @property
    def scores(self) -> NDArray[np.float32]:
        """Logits of every cached token, [n_tokens, n_vocab]; needs logits_all."""
        return self.evaluator.scores

    @property
    def eval_logits(self) -> list[list[float]]:
        return self.evaluator.eval_logits

    def eval(self, tokens: Sequence[int]) -> None:
        """Runs `tokens` after the cached ones. Raises when they do not fit; an interrupted call keeps what
        is computed."""
        self.evaluator.eval(tokens)

    def eval_all(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """eval() that returns the logits of all `tokens`, [len(tokens), n_vocab]."""
        return self.evaluator.eval_all(tokens)

    def reuse_prefix(self, tokens: Sequence[int]) -> int:
        """Forgets what `tokens` do not begin with; returns how many of them the cache holds."""
        return self.evaluator.reuse_prefix(tokens)

    def truncate(self, count: int) -> None:
        """Keeps the first `count` cached tokens."""
        self.evaluator.truncate(count)

    def reset(self) -> None:
        """Empties the cache."""
        self.evaluator.reset()

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """How many tokens both begin with."""
        return common(a, b)

    # States, and caches of them.

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Where completions keep what they computed, and look for what begins like their prompts. Without
        one (None) the previous call's prefix alone is reused. A cache belongs to one model and its cache
        formats."""
        self.cache = cache

    def recall(self, prompt: Sequence[int]) -> None:
        """Replaces the cache by a kept state that has more of the prompt, if there is one. For callers that
        hold the cache."""
        if self.cache is None or prompt not in self.cache:
            return
        state = self.cache[prompt]
        if common(state.input_ids, list(prompt)) > common(self.evaluator.eval_tokens, list(prompt)):
            self.evaluator.restore(state)

    def remember(self) -> None:
        """Keeps what the cache holds now."""
        if self.cache is not None:
            self.cache[self.evaluator.eval_tokens] = self.save_state()

    @locked
    def save_state(self, path: str | Path | None = None, extra: dict[str, Any] | None = None) -> LlamaState:
        """A copy of the cache and of what belongs to it; with `path`, also written there."""
        state = LlamaState(
            input_ids=self.evaluator.eval_tokens,
            cache=self.session.state_bytes(),
            logits=self.logits.copy() if self.evaluator.has_logits else None,
            seed=self.seed,
            extra=dict(extra or {}),
        )
        if path is not None:
            state.write(path)
        return state

    @locked
    def load_state(self, state: LlamaState | str | Path) -> LlamaState:
        """Goes on from a state (or the file of one) that the same model saved; returns it. Rows of other
        formats, budgets or exact windows are coded anew, and what they lose is said in one line."""
        if not isinstance(state, LlamaState):
            state = LlamaState.read(state)
        self.evaluator.hold(None)
        self.evaluator.restore(state, "any")
        self.set_seed(state.seed)
        return state

    # Answers.

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        typical_p: float = 1.0,
        temp: float | None = None,
        repeat_penalty: float | None = None,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int | None = None,
        mirostat_tau: float | None = None,
        mirostat_eta: float | None = None,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessor | None = None,
        stopping_criteria: StoppingCriteria | None = None,
        grammar: LlamaGrammar | str | None = None,
        seed: int | None = None,
        **server: Any,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yields tokens after `tokens`, without end: the caller stops at an end token or when it has enough.

        `reset` replaces what is cached (keeping a common prefix); False continues it. `send(more)` evaluates
        `more` tokens after the yielded one. `server` as in create_completion. Raises when the context is
        full.
        """
        options = SamplingOptions.of_call("generate", locals(), self)
        return (yield from tokens_after(self, tokens, options, reset, logits_processor, stopping_criteria))

    @locked
    def sample(
        self,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        typical_p: float = 1.0,
        temp: float | None = None,
        repeat_penalty: float | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int | None = None,
        mirostat_eta: float | None = None,
        mirostat_tau: float | None = None,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessor | None = None,
        grammar: LlamaGrammar | str | None = None,
        idx: int | None = None,
        seed: int | None = None,
        **server: Any,
    ) -> int:
        """One token from the logits after the last cached token, or after token `idx` (needs logits_all).
        `server` as in create_completion."""
        options = SamplingOptions.of_call("sample", locals(), self)
        return next_token(self, options, logits_processor, idx)

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """create_chat_completion() whose answers are the objects of the openai package: a ChatCompletion,
        or with `stream` an iterator of ChatCompletionChunk."""
        return openai_objects(self.create_chat_completion, *args, **kwargs)

    # Ends.

    @locked
    def close(self) -> None:
        """Frees cache and weights, at once; calling it again does nothing."""
        self._model = self._template = self.cache = None
        self.evaluator.forget_session()

    def __enter__(self) -> Llama:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "evaluator"):  # absent when the constructor raised
            with suppress(ShuttingDown):
                self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments | {"seed": self._seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @staticmethod
    def logits_to_logprobs(logits: NDArray[np.float32], axis: int = -1) -> NDArray[np.float64]:
        """Natural logarithm of softmax(logits) in float64, same shape."""
        return log_softmax(logits, axis)
