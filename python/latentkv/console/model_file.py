"""What a path that should be a GGUF is instead, and what to do about it."""

from __future__ import annotations

import re
from pathlib import Path

from latentkv.errors import LatentKVError, expected

_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?")
_OLD = (b"ggml", b"ggmf", b"ggjt", b"ggla", b"lmgg", b"fmgg", b"tjgg", b"algg")  # either order of bytes
_DOWNLOAD = "download the file itself, or name its repository with -hf USER/REPO"


def no_gguf(path: str | Path, converting: bool = False) -> LatentKVError | None:
    """The error for something that is known to be no GGUF. None for anything else: the reader says what is
    wrong with a GGUF or with the file system. converting: directories of checkpoints are welcome."""
    text, where = str(path), Path(path)
    if not text.strip():
        return expected("model", "the name of a GGUF", repr(text))
    if re.match(r"[a-z]+://|https?:/", text):
        return expected("model", "a file", text, _DOWNLOAD)
    try:
        if where.is_dir():
            return None if converting else _folder(where)
        if not where.is_file():
            if where.exists() or text.endswith(".gguf") or not _REPOSITORY.fullmatch(text):
                return None
            hint = f"-hf {text} downloads it from huggingface.co"
            return expected("model", "a GGUF", f"no such file {text}", hint)
        with where.open("rb") as file:
            head = file.read(64)
    except (OSError, ValueError):  # no permission, say, or a name with a null character
        return None
    got, hint = _kind(head, where, converting)
    return expected("model", "a GGUF", f"{got} {where}", hint) if got else None


def _folder(folder: Path) -> LatentKVError:
    files = sorted(folder.glob("*.gguf"))
    hint = f"write {files[0]}" if files else _of_checkpoint(folder)
    return expected("model", "a GGUF", f"the directory {folder}", hint)


def _of_checkpoint(folder: Path, converting: bool = False) -> str:
    """What to do with the checkpoint of a directory; "" for a directory without one."""
    if not (folder / "config.json").is_file():
        return ""
    return (
        f"pass its directory {folder}"
        if converting
        else f"latentkv convert {folder} -o OUT.gguf makes one of this checkpoint"
    )


def _kind(head: bytes, path: Path, converting: bool) -> tuple[str, str]:
    """What a file is by its first bytes, and what to do; "" for a GGUF, and for what nobody knows."""
    if head[:4] == b"GGUF":
        return "", ""
    if not head:
        return "an empty file", "download it again"
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS in place of the file", "git lfs pull downloads it"
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return "a web page", _DOWNLOAD
    if head[:4] in _OLD:
        return "a model file of an early llama.cpp", "download the model as a GGUF"
    if head[8:9] == b"{" or path.suffix == ".safetensors":
        return "the checkpoint file", _of_checkpoint(path.parent, converting)
    if head[:4] == b"PK\x03\x04":
        return "a ZIP archive or a PyTorch checkpoint", _of_checkpoint(path.parent, converting)
    if path.name == "config.json":
        return "a checkpoint's", _of_checkpoint(path.parent, converting)
    return "", ""
