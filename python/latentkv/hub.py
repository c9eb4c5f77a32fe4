"""GGUFs from huggingface.co: which file of a repository is meant, and where it lies on this machine.

`-hf user/repo[:quant]` reads as in llama.cpp: without a quantization Q4_K_M, else the first GGUF. Files
stay in huggingface_hub's cache; without a connection what lies there is used.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from latentkv.errors import LatentKVError, expected

DEFAULT_QUANT = "Q4_K_M"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
# GGUFs that are no decoders: projectors of pictures, statistics, and what guesses tokens ahead for another
# model, which has a folder of its own, or begins so
_GUESSES = "mtp|draft|drafts|drafter|drafters|eagle[0-9]*|dflash|dspark|medusa"
_NO_MODEL = re.compile(rf"(^|[/._-])(mmproj|imatrix)|(^|/)({_GUESSES})[/._-]", re.IGNORECASE)
_UNLIKELY = re.compile(rf"[/._-]({_GUESSES})[._-]", re.IGNORECASE)  # a whole model's name may have it, too
_TIMEOUT = 10.0  # seconds for the list of a repository's files


def split_name(text: str, flag: str = "-hf") -> tuple[str, str]:
    """`user/repo:quant` -> (repo, quant); without one, an empty string."""
    repo, _, quant = text.partition(":")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo) or (
        ":" in text and not re.fullmatch(r"[\w.-]+", quant)
    ):
        raise expected(flag, "user/repo or user/repo:quant", repr(text))
    return repo, quant


def choose(files: Sequence[str], repo: str, quant: str = "", pattern: str = "") -> list[str]:
    """Files of one model, the first part first: those that match `pattern` (a name, or one with * and
    ?), those of a quantization, or the default.

    Raises:
        LatentKVError: none, or a pattern that several models match.
    """
    models = sorted(name for name in files if name.lower().endswith(".gguf"))
    if pattern:
        found = _whole([name for name in models if fnmatch.fnmatchcase(name, pattern)])
    else:
        models = [name for name in models if not _NO_MODEL.search(name)]
        models.sort(key=lambda name: _UNLIKELY.search(name) is not None)
        found = _whole(_of_quant(models, quant or DEFAULT_QUANT)) or ([] if quant else _whole(models))[:1]
    if not found:
        wanted = f"a GGUF {pattern or quant}".rstrip()
        beside = [] if models else [name for name in files if name.lower().endswith(".gguf")]
        got = f"only {_listed(beside)}, beside a model" if beside else _listed(models)
        raise expected("-hf", f"{wanted} in {repo}", got)
    if pattern and len(found) > 1:
        raise expected("-hf", f"one file that matches {pattern} in {repo}", _listed(found))
    first = found[0]
    match = _PART.fullmatch(first)
    if match is None:
        return [first]
    parts = [f"{match[1]}-{i:05}-of-{match[3]}.gguf" for i in range(1, int(match[3]) + 1)]
    missing = [part for part in parts if part not in files]
    if missing:
        raise expected("-hf", f"all {len(parts)} parts of {first} in {repo}", f"no {missing[0]}")
    return parts


def _whole(names: Sequence[str]) -> list[str]:
    """Without the later parts of split files."""
    return [name for name in names if (match := _PART.fullmatch(name)) is None or int(match[2]) == 1]


def _of_quant(names: Sequence[str], quant: str) -> list[str]:
    """Q4_K_M is in model-Q4_K_M.gguf and model.q4_k_m.gguf, Q4_K is not; nor is XL's in Q4_K_XL."""
    word = re.compile(rf"(^|[^a-z0-9_]){re.escape(quant)}($|[^a-z0-9_])", re.IGNORECASE)
    return [name for name in names if word.search(name)]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown or "no GGUF"


def fetch(
    repo: str, quant: str = "", pattern: str = "", cache_dir: str | Path | None = None, **options: Any
) -> Path:
    """Downloads what is not in the cache yet; the first part's path. options: of hf_hub_download.

    Raises:
        LatentKVError: no huggingface_hub, no such repository or file, or no connection and nothing cached.
    """
    hub = _hub()
    where: dict[str, Any] = {"cache_dir": cache_dir, **options}
    try:
        info = hub.HfApi().model_info(
            repo, revision=options.get("revision"), token=options.get("token"), timeout=_TIMEOUT
        )
        names = [file.rfilename for file in info.siblings or []]
    except Exception as error:  # httpx's, requests' and huggingface_hub's own, by its version
        refused = _refusal(error, repo)
        if refused is not None:
            raise refused from None
        return _cached(hub, repo, quant, pattern, where, error)
    try:
        paths = [hub.hf_hub_download(repo, name, **where) for name in choose(names, repo, quant, pattern)]
    except LatentKVError:
        raise
    except Exception as error:
        refused = _refusal(error, repo) or expected("-hf", f"to download from {repo}", _reason(error))
        raise refused from None
    return Path(paths[0])


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        hint = "install with pip install 'latentkv[hub]'"
        raise expected("-hf", "the package huggingface_hub", "none", hint) from None
    return huggingface_hub


def _refusal(error: Exception, repo: str) -> LatentKVError | None:
    """What the server says of the repository; None: it was not reached."""
    name = type(error).__name__
    if name == "GatedRepoError":
        hint = f"accept its licence at huggingface.co/{repo}, then hf auth login"
        return expected("-hf", f"access to {repo}", "a gated repository", hint)
    if name == "RepositoryNotFoundError":
        return expected("-hf", "a public repository", repo, "for a private one: hf auth login")
    if name == "RevisionNotFoundError":
        return expected("-hf", f"a revision of {repo}", "none of this name")
    return None


def _cached(hub: Any, repo: str, quant: str, pattern: str, where: dict[str, Any], error: Exception) -> Path:
    """What an earlier download left."""
    taken: Callable[..., str] = hub.snapshot_download
    keys = ("cache_dir", "local_dir", "revision")
    try:
        folder = Path(taken(repo, local_files_only=True, **{key: where[key] for key in keys if key in where}))
    except Exception:
        got = f"no connection ({_reason(error)}) and nothing of it in the cache"
        raise expected("-hf", f"to reach huggingface.co for {repo}", got) from None
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    return folder / choose(names, repo, quant, pattern)[0]


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words[:120]
