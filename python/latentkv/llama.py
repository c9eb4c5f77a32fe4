"""`Llama`: one model with one cache, under llama-cpp-python's names. This file opens and closes it; what is
open and the verbs have their own files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentkv import _core, compat, hub, ranges
from latentkv.chat.template import require_built_in
from latentkv.errors import expected
from latentkv.generate.chat import create_chat_completion, create_chat_completion_openai_v1
from latentkv.generate.completion import create_completion
from latentkv.generate.embedding import create_embedding, embed
from latentkv.generate.loop import generate, sample
from latentkv.open_model import OpenModel
from latentkv.plan.fit import Asked, Fit, fit
from latentkv.plan.formats import format_name
from latentkv.plan.gpus import Gpus
from latentkv.plan.master import planned
from latentkv.sampling.logprobs import log_softmax
from latentkv.sampling.options import RANDOM_SEED
from latentkv.sampling.speculative import DraftModel
from latentkv.session.effect import require_effect
from latentkv.session.pooling import pooling_name
from latentkv.session.prefix import Window
from latentkv.session.turns import ShuttingDown, in_turn
from latentkv.text import utf8


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The constructor's arguments by name, from its locals()."""
    named = {key: value for key, value in given.items() if key not in ("self", "llama_cpp", "__class__")}
    return named | given["llama_cpp"]


class Llama(OpenModel):
    """A GGUF model and its cache.

    `latent_path` is a sidecar of the model: a latent cache's factors and plan, in a file of their own.
    `n_ctx` counts tokens (512 as in llama-cpp-python; 0 = the trained context); `n_batch` tokens go to
    native code per call and `n_ubatch` through the graph at once. Cache: `kv` is a preset ("balanced",
    "small", "smallest": docs/cache.md), one row format for K and V, or both as "c4/q4" ("" = the file's plan,
    else f16); `kv_k`/`kv_v` override one of them, `type_k`/`type_v` are llama-cpp-python's names for the
    same, as format names or ggml type numbers; `kv_budget` plans a master
    file anew ("14%" of the f16 cache, or "2.5GiB@131072": bytes at a context). `n_gpu_layers`, `n_ctx` and
    `kv_budget` may be "auto": what fits in free memory, which `fit` says then. Several GPUs share the layers:
    `tensor_split` gives their shares in order (None = by free memory), `split_mode` 0 ("none") puts all on
    `main_gpu` instead. `sink`/`recent` count tokens
    that keep every segment, `recent_ratio` is recent as a share of the sequence (-1 = the file's default),
    `kv_sink`/`kv_recent` are their formats ("" = the file's, else f16); `evict` names a policy by which each
    layer gives up tokens ("h2o", "keyformer", "snapkv"), `keep_tokens` is what it keeps of a sequence (a
    count, or "50%" of its context), sinks and recent tokens among them; `prefill` "lazy" lets a prompt that
    starts the cache attend to exact K and V, "eager" to the compressed past ("" = the file's default);
    `require_fused` turns a slower implementation into an error. `chat_format` names a built-in template,
    `chat_template` is one (Jinja); without them the file's own is used. `draft_model` guesses tokens ahead
    (LlamaPromptLookupDecoding), which are verified together; `pooling_type` says how embed()
    makes one vector of a text: "mean", "cls" (the first token's), "last", "none" (each token keeps its
    own), or llama.cpp's number for one of these (-1 = the file's, else none). `spm_infill` puts the suffix
    of an infill first. Pickling keeps the arguments, not the cache. Arguments of llama-cpp-python that have
    no meaning here are accepted at their neutral value and refused, with the reason, at any other.

    The cache is reused: a prompt that begins like the tokens already cached computes only the rest. Threads
    may share an object: their calls take turns, whole calls unless they stream. A stream goes on whatever
    other calls come between its steps: its rows wait in memory meanwhile, a copy each way.
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
        seed: int = RANDOM_SEED,
        n_ctx: int | str = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        logits_all: bool = False,
        last_n_tokens_size: int = 64,
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
        kv_budget: str = "",
        kv_sink: str = "",
        kv_recent: str = "",
        kv_rotate: bool = True,
        sink: int = -1,
        recent: int = -1,
        recent_ratio: float = -1.0,
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
        n_ctx = ranges.check_auto("n_ctx", ranges.N_CTX, n_ctx)
        n_gpu_layers = ranges.check_auto("n_gpu_layers", ranges.N_GPU_LAYERS, n_gpu_layers)
        gpus = Gpus.of(tensor_split, main_gpu, split_mode)
        n_batch = ranges.N_BATCH.check("n_batch", n_batch)
        n_ubatch = min(n_batch, ranges.N_BATCH.check("n_ubatch", n_ubatch))
        _core.set_log_level(2 if verbose else 1)
        self.model_path = str(model_path)
        utf8(self.model_path, "model_path")
        self.latent_path = None if latent_path is None else str(latent_path)
        utf8(self.latent_path or "", "latent_path")
        self.last_n_tokens_size = ranges.PENALTY_LAST_N.check("last_n_tokens_size", last_n_tokens_size)
        self.verbose = verbose
        options = dict(
            n_threads=ranges.N_THREADS.check("n_threads", n_threads or 0),
            n_threads_batch=ranges.N_THREADS.check("n_threads_batch", n_threads_batch or n_threads or 0),
            kv=kv,
            kv_k=compat.one_of("kv_k", kv_k, "type_k", format_name(type_k, "type_k")),
            kv_v=compat.one_of("kv_v", kv_v, "type_v", format_name(type_v, "type_v")),
            kv_budget=kv_budget,
            kv_sink=kv_sink,
            kv_recent=kv_recent,
            kv_rotate=kv_rotate,
            sink=ranges.SINK.check("sink", sink),
            recent=ranges.RECENT.check("recent", recent),
            recent_ratio=recent_ratio
            if recent_ratio == -1
            else ranges.RATIO.check("recent_ratio", recent_ratio),
            evict=evict,
            keep_tokens=str(keep_tokens),
            prefill=prefill,
            implementation=implementation,
            require_fused=require_fused,
        )
        sizes: dict[str, Any] = dict(
            n_ubatch=ranges.N_UBATCH.check("n_ubatch", n_ubatch),
            n_seq_max=ranges.N_SEQ_MAX.check("n_seq_max", n_seq_max),
        )
        if vocab_only:
            self.fit = Fit(0, 0, options)
        else:
            self.fit = fit(
                self.model_path,
                self.latent_path or "",
                Asked(n_gpu_layers, n_ctx, **sizes, gpus=gpus),
                options,
            )
        model = _core.Model(
            self.model_path,
            latent_path=self.latent_path or "",
            **self.fit.placement,
            use_mmap=use_mmap,
            vocab_only=vocab_only,
        )
        session, reopen, rows = None, None, self.fit.options
        if not vocab_only:
            rows = planned(model, rows)
            reopen = partial(_core.Session, model, n_ctx=self.fit.n_ctx, **sizes, **rows)
            session = reopen()
            require_effect(session, options)
            if draft_model is not None and session.evict != "none":
                wanted = "none beside eviction, in which guesses would count"
                raise expected("draft_model", wanted, f"evict={session.evict!r}")
        self.draft_model = draft_model
        self.spm_infill = spm_infill
        window = Window.of({} if vocab_only else model.regions, rows["recent"], rows["recent_ratio"])
        super().__init__(model, session, n_batch, logits_all, window, reopen)
        self.set_seed(seed)
        self._template_choice = (chat_format, chat_template)
        self._pooling = None if pooling_type == -1 else pooling_name("pooling_type", pooling_type)

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

    # The verbs.
    generate = generate
    sample = sample
    create_completion = create_completion
    __call__ = create_completion
    create_chat_completion = create_chat_completion
    create_chat_completion_openai_v1 = create_chat_completion_openai_v1
    embed = embed
    create_embedding = create_embedding

    @in_turn
    def close(self) -> None:
        """Frees cache and weights; calling it again does nothing."""
        self._model = None
        self.forget_session()

    def __enter__(self) -> Llama:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_session"):  # absent when the constructor raised
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
