"""From Llama's arguments to what is open: weights, what was chosen for them, and a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from latentkv import _core, ranges
from latentkv.console.model_file import no_gguf
from latentkv.errors import expected
from latentkv.plan.effect import require_effect
from latentkv.plan.fit import Asked, Fit, fit
from latentkv.plan.formats import format_name, one_of
from latentkv.plan.gpus import Gpus
from latentkv.plan.master import planned
from latentkv.plan.options import SessionOptions
from latentkv.sampling.speculative import DraftModel, LlamaPromptLookupDecoding


@dataclass(frozen=True)
class OpenModel:
    """session: None where a vocabulary alone is open. reopen: makes an empty session like it."""

    model: _core.Model
    fit: Fit
    session: _core.Session | None = None
    reopen: Callable[[], _core.Session] | None = None


def open_model(path: str, latent_path: str, n_batch: int, given: Mapping[str, Any]) -> OpenModel:
    """given: Llama's arguments by name.

    Raises:
        LatentKVError: an argument out of its range or without an effect, or a file that cannot be opened so.
    """
    if error := no_gguf(path):
        try:
            raise error
        finally:
            del error  # a circle of this frame, and those that called it, with all that they have open
    n_ctx = ranges.check_auto("n_ctx", ranges.N_CTX, given["n_ctx"])
    n_gpu_layers = ranges.check_auto("n_gpu_layers", ranges.N_GPU_LAYERS, given["n_gpu_layers"])
    gpus = Gpus.of(given["tensor_split"], given["main_gpu"], given["split_mode"])
    options = _options(given, n_batch)
    asked = Asked(n_gpu_layers, n_ctx, gpus, given["weights"])
    chosen = (
        Fit(0, 0, options, weights=asked.weights)
        if given["vocab_only"]
        else fit(path, latent_path, asked, options)
    )
    model = _core.Model(
        path,
        latent_path=latent_path,
        **chosen.placement,
        use_mmap=given["use_mmap"],
        use_mlock=given["use_mlock"],
        vocab_only=given["vocab_only"],
    )
    if given["vocab_only"]:
        return OpenModel(model, chosen)
    reopen = partial(_core.Session, model, **replace(planned(model, chosen.options), n_ctx=chosen.n_ctx))
    session = reopen()
    require_effect(session, options)
    if given["draft_model"] is not None and session.evict != "none":
        wanted = "none beside eviction, in which guesses would count"
        raise expected("draft_model", wanted, f"evict={session.evict!r}")
    return OpenModel(model, chosen, session, reopen)


def _guesses(draft: DraftModel | None) -> int:
    """How many of a draft model's guesses recurrent layers keep a state of. One that does not say how many it
    makes is taken for one that makes as many as ours by default."""
    if draft is None:
        return 0
    usual = LlamaPromptLookupDecoding().num_pred_tokens
    return min(int(getattr(draft, "num_pred_tokens", usual)), _core.MOST_GUESSES)


def _options(given: Mapping[str, Any], n_batch: int) -> SessionOptions:
    """The session's, without the context, which fit() chooses."""

    def format_of(side: str) -> str:
        ours, theirs = f"kv_{side}", f"type_{side}"
        return one_of(ours, given[ours], theirs, format_name(given[theirs], theirs))

    n_threads = given["n_threads"] or 0
    own = {
        "n_ctx": 0,
        "n_batch": n_batch,
        "n_guesses": _guesses(given["draft_model"]),
        "n_threads": n_threads,
        "n_threads_batch": given["n_threads_batch"] or n_threads,
        "kv_k": format_of("k"),
        "kv_v": format_of("v"),
    }
    return SessionOptions.checked({**given, **own})
