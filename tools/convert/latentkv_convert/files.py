"""The files of a conversion: which names it refuses before any work, and which it has finished when it
stops."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from latentkv import durable
from latentkv.quantities import bytes_text

from .errors import ConvertError
from .recipe import Recipe
from .source import gguf_file

_READ_SUFFIXES = (".safetensors", ".bin", ".model", ".index.json", ".jinja")
_READ_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
)
_SMALL = 1 << 20  # bytes of a report or a picture, at most
_KINDS = {
    stat.S_IFDIR: "the directory",
    stat.S_IFCHR: "the device",
    stat.S_IFBLK: "the device",
    stat.S_IFIFO: "the pipe",
    stat.S_IFSOCK: "the socket",
}


def check(recipe: Recipe) -> None:
    """Refuses before the long work what could not be read in it or written after it.

    Raises:
        ConvertError: a text that is not there; an output that is no regular file, or that is read.
    """
    texts = [("--calib", path) for path in recipe.calib]
    if recipe.finetune is not None:
        texts.append(("--finetune", recipe.finetune.text))
    for option, text in texts:
        _check_text(option, text)
    times = recipe.options.get("gpu_times")
    read = [*(text for _, text in texts), *([] if times is None else [times])]
    for path in recipe.outputs:
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            raise ConvertError("--output", f"an existing directory {target.parent}", "no such directory")
        kind = _kind(target)
        if kind not in (None, stat.S_IFREG):
            raise ConvertError("--output", "a file name", f"{_KINDS.get(kind, 'the special file')} {path}")
        if _is_read(recipe.source, target) or _is_one_of(target, read):
            raise ConvertError("--output", "a file that this conversion does not read", str(path))


def check_room(recipe: Recipe, n_bytes: int) -> None:
    """Tries to write before the long work. n_bytes: of the output, at most.

    Raises:
        ConvertError: there is no permission, or too little room.
    """
    sizes = (n_bytes, *[_SMALL] * (len(recipe.outputs) - 1))
    for path, size in zip(recipe.outputs, sizes, strict=True):
        try:
            durable.rehearse(Path(os.path.realpath(path)), size)
        except OSError as error:
            raise ConvertError("output", f"to write {path}", error.strerror or str(error)) from None
    _check_free("output", _folder(recipe), sum(sizes), "choose another folder for it")


def check_store(recipe: Recipe, root: Path, n_bytes: int, output: int) -> None:
    """The same of what is kept at `root`. output: bytes of the file, which may come to the same disk.

    Raises:
        ConvertError: there is no permission, or too little room.
    """
    hint = "set XDG_CACHE_HOME or pass --no-cache"
    try:
        root.mkdir(parents=True, exist_ok=True)
        durable.rehearse(root / "layers", n_bytes)
    except OSError as error:
        raise ConvertError("cache", f"to write {root}", error.strerror or str(error), hint) from None
    both = output if root.stat().st_dev == _folder(recipe).stat().st_dev else 0
    _check_free("cache", root, n_bytes + both, hint)


def _folder(recipe: Recipe) -> Path:
    """Where the output will lie."""
    return Path(os.path.realpath(recipe.output)).parent


def _check_free(where: str, folder: Path, need: int, hint: str) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise ConvertError(where, f"{bytes_text(need)} free at {folder}", bytes_text(free), hint)


def _check_text(option: str, path: Path) -> None:
    expected = f"a readable text file at {path}"
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except OSError as error:
        raise ConvertError(option, expected, error.strerror or str(error)) from None
    if kind != stat.S_IFREG:  # it is read more than once
        raise ConvertError(option, expected, _KINDS.get(kind, "another kind of file").replace("the ", "a "))
    if not os.access(path, os.R_OK):
        raise ConvertError(option, expected, "no permission to read it")


def _kind(path: Path) -> int | None:
    """The type bits of a file's mode; None where there is no file."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConvertError("--output", f"to write {path}", error.strerror or str(error)) from None


def _is_read(source: Path, path: Path) -> bool:
    """`path`, there or not, is one of the files that make up the source, by name or through a link."""
    if not source.is_dir():
        return _is_one_of(path, gguf_file.paths(source))
    return (_reads(path) and path.parent.samefile(source)) or _is_one_of(path, _held(source))


def _held(checkpoint: Path) -> Iterator[Path]:
    yield from (path for path in checkpoint.iterdir() if _reads(path))
    yield from (checkpoint / "additional_chat_templates").glob("*.jinja")


def _reads(path: Path) -> bool:
    return path.name in _READ_NAMES or path.name.endswith(_READ_SUFFIXES)


def _is_one_of(path: Path, others: Iterable[Path]) -> bool:
    return path.exists() and any(path.samefile(other) for other in others if other.exists())


class Progress:
    """Which outputs are finished. Each is renamed into place when complete, so that its inode tells."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._before = {path: _identity(path) for path in paths}

    def __str__(self) -> str:
        """`out.gguf is complete, out.report.json is not written`, or "" when nothing is complete."""
        done = [path.name for path, before in self._before.items() if _identity(path) != before]
        missing = [path.name for path in self._before if path.name not in done]
        if not done:
            return ""
        return _listed(done, "complete") + (f", {_listed(missing, 'not written')}" if missing else "")


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _listed(names: list[str], what: str) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {what}"
