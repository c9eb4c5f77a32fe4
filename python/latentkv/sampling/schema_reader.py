"""A JSON schema with its definitions, read part by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from latentkv.sampling.schema_part import APPLIED, SchemaPart, schema_error, short

DEEPEST = 60  # schemas in schemas: what reads the result recurses


class SchemaReader:
    def __init__(self, root: Any) -> None:
        self._root = root
        # of definitions, by the pointer that a $ref has and by whether nothing stands beside it
        self._names: dict[tuple[str, bool], str] = {}
        self._waiting: list[tuple[str, bool]] = []  # those that have not been read
        self._steps: set[float] = set()  # values of multipleOf
        self.has_patterns = False  # of keys

    def part(self, schema: Any, at: str) -> dict[str, Any]:
        """A schema in this document, as one of its own."""
        schema = self.read(schema, at, 0, is_alone=True)
        definitions = {}
        while self._waiting:
            pointer, is_alone = self._waiting.pop()
            target = self._target(pointer, pointer)
            definitions[self._names[pointer, is_alone]] = self.read(target, pointer, 0, is_alone)
        if isinstance(schema, bool):
            schema = {} if schema else {"anyOf": [False]}
        return schema | ({"$defs": definitions} if definitions else {})

    def read(self, schema: Any, at: str, depth: int, is_alone: bool) -> Any:
        """is_alone: what it describes is described by nothing else."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise schema_error("a schema (an object, true or false)", f"{short(schema)} at {at or '/'}", at)
        if depth > DEEPEST:
            raise schema_error(f"schemas at most {DEEPEST} deep", f"a deeper one at {at[:80]}…", at)
        return SchemaPart(self, schema, at, depth, is_alone).read()

    def definition(self, reference: Any, at: str, is_alone: bool) -> dict[str, Any]:
        """A $ref to a place of this document, under a name without signs that pointers escape."""
        self._target(reference, at)
        key = (reference, is_alone)
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            self._waiting.append(key)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def inlined(self, schema: Any, at: str) -> tuple[Any, str]:
        """What a schema that is only a $ref refers to: llguidance compares alternatives of oneOf that it
        sees."""
        seen = set()
        while isinstance(schema, Mapping) and "$ref" in schema and not set(schema) & APPLIED:
            reference = schema["$ref"]
            target = self._target(reference, at)
            if reference in seen:
                raise schema_error("a $ref that leads to a schema", f"a circle at {at}/$ref", f"{at}/$ref")
            seen.add(reference)
            schema, at = target, str(reference)
        return schema, at

    def _target(self, reference: Any, at: str) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            got = f"{short(reference)} at {at}/$ref"
            raise schema_error(
                "a $ref to a place of this schema (#/…)", got, f"{at}/$ref", "put it under $defs"
            )
        try:
            return self.find(unquote(reference[1:]))
        except LookupError:
            got = f"{short(reference)} at {at}/$ref"
            raise schema_error("a $ref to a place that exists", got, f"{at}/$ref") from None

    def find(self, pointer: str) -> Any:
        """What stands at a place of the document."""
        found = self._root
        for part in pointer.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found[int(key)] if isinstance(found, list) and key.isdecimal() else found[key]
        return found

    def add_step(self, step: float) -> bool:
        """Whether llguidance can combine it with those before: their product stays below 2^32."""
        self._steps.add(step)
        return len(self._steps) == 1 or max(self._steps) / min(self._steps) * max(self._steps) < 2**16
