"""A Hugging Face checkpoint directory: its config and, one at a time, its tensors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from latentkv.console.reading import read_text

from ..compute import floats
from ..errors import ConvertError
from ..ir import F32
from . import fingerprint
from .layouts import fp8
from .layouts.torch_file import TorchFile
from .safetensors_file import SafetensorsFile


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path, path.name))
    except FileNotFoundError:
        raise ConvertError("checkpoint", f"a file {path.name} in {path.parent}", "no such file") from None
    except OSError as error:
        raise ConvertError("checkpoint", f"a readable file {path}", error.strerror or str(error)) from None
    except ValueError as error:
        raise ConvertError("checkpoint", f"JSON in {path}", f"{error}") from None


class Checkpoint:
    """Tensors by name, whichever of the four layouts holds them (one file or shards, safetensors or
    PyTorch)."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            got = "a file" if directory.exists() else "no such directory"
            raise ConvertError("checkpoint", f"a directory at {directory}", got)
        self.directory = directory
        self.config: dict[str, Any] = read_json(directory / "config.json")
        if not isinstance(self.config, dict) or "model_type" not in self.config:
            raise ConvertError("checkpoint", "config.json with a model_type", "none")
        self._block = fp8.block_size(self.config)
        self._files: dict[str, SafetensorsFile | TorchFile] = {}
        self._where = self._index()

    def _index(self) -> dict[str, str]:
        """Tensor name -> file name."""
        for stem in ("model.safetensors", "pytorch_model.bin"):
            index = self.directory / f"{stem}.index.json"
            if index.is_file():
                found = read_json(index)
                where = found.get("weight_map") if isinstance(found, dict) else None
                if not isinstance(where, dict) or not where:
                    raise ConvertError(index.name, "a weight_map", "none")
                if not all(isinstance(file, str) for file in where.values()):
                    raise ConvertError(index.name, "a weight_map of tensors' and files' names", "others")
                all_held: dict[str, str] = {}
                for file in sorted(set(where.values())):
                    held = self._names(self._shard(file))
                    missing = [name for name, at in where.items() if at == file and name not in held]
                    if missing:
                        raise ConvertError(file, f"the tensor {missing[0]} that the index promises", "none")
                    all_held |= dict.fromkeys(held, file)
                return all_held | where
            if (self.directory / stem).is_file():
                return {name: stem for name in self._names(self._shard(stem))}
        raise ConvertError(
            "checkpoint",
            f"model.safetensors, pytorch_model.bin or their .index.json in {self.directory}",
            "none",
        )

    def _shard(self, file: str) -> Path:
        path = self.directory / file
        if Path(file).name != file or not path.is_file():
            raise ConvertError("checkpoint", f"the shard {file} that the index names", "no such file")
        return path

    def _names(self, path: Path) -> set[str]:
        opened = SafetensorsFile if path.suffix == ".safetensors" else TorchFile
        self._files[path.name] = opened(path)
        return set(self._files[path.name].names())

    def __contains__(self, name: str) -> bool:
        return self.stored(name) is not None

    def names(self) -> list[str]:
        return sorted(self._where)

    def stored(self, name: str) -> str | None:
        """The name that a tensor has here, if it is here. Base-model checkpoints lack the leading `model.` or
        `transformer.`: look for the name without it. Older ones that see pictures hold a whole text model, as
        `language_model` or beside what sees."""
        older = name.replace("model.language_model.", "model.")
        for candidate in (name, name.partition(".")[2], f"language_model.{older}", older):
            if candidate in self._where:
                return candidate
        return None

    def _found(self, name: str) -> str:
        found = self.stored(name)
        if found is None:
            raise ConvertError("checkpoint", f"a tensor {name}", f"none among {len(self._where)} tensors")
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._found(name)
        return self._files[self._where[found]].shape(found)

    def read(self, name: str) -> F32:
        """The tensor as float32.

        Raises:
            ConvertError: it is missing, of a type that is not floating point, or not finite.
        """
        found = self._found(name)
        file = self._files[self._where[found]]
        array = file.read(found)
        if file.is_fp8(found):
            array = fp8.scaled(found, array, self._block, self._raw, self._where.__contains__)
        floats.check_finite(array, name)
        return array

    def columns(self, name: str, part: slice) -> F32:
        """Some columns of a matrix, as float32."""
        found = self._found(name)
        file = self._files[self._where[found]]
        if file.is_fp8(found):
            return self.read(name)[:, part]
        array = file.columns(found, part)
        floats.check_finite(array, name)
        return array

    def _raw(self, name: str) -> F32:
        """A tensor of scales."""
        return self._files[self._where[name]].read(name)

    def identity(self) -> str:
        """SHA-256 of the config and of a sample of every shard's bytes."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for file in sorted(set(self._where.values())):
            path = self.directory / file
            digest.update(f"{file}:{path.stat().st_size}".encode())
            fingerprint.add_file(digest, path)
        return digest.hexdigest()
