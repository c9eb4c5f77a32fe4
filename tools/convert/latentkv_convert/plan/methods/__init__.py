"""Compression methods: one module each; the directory is the registry.

A module `plan/methods/<name>.py` provides

    SUMMARY: str                                        one line for --help
    def add_arguments(parser) -> None                   its own options
    def create(options, spec: ModelSpec) -> Method      checks them against the model
    def resolved(options, spec, window) -> options      optional: with those that depend on the model and on
                                                        windows of the text

and a Method

    needs: tuple[str, ...]                              statistics, modules of calibrate/
    def decompose(work, layer, side, group) -> tuple[Basis]     full rank, one for every `group` KV heads
    def plan(work) -> Plan                              paths, groups, ranks, segments
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from ...errors import ConvertError
from ...ir import Basis, ModelSpec, Plan
from ...recipe import Recipe
from ...work import Work


class Method(Protocol):
    @property
    def needs(self) -> tuple[str, ...]: ...
    def decompose(self, work: Work, layer: int, side: str, group: int) -> tuple[Basis, ...]: ...
    def plan(self, work: Work) -> Plan: ...


class MethodModule(Protocol):
    SUMMARY: str

    def add_arguments(self, parser: Any) -> None: ...
    def create(self, options: Mapping[str, Any], spec: ModelSpec) -> Method: ...


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def planned(method: Method, work: Work) -> Plan:
    """The method's plan as the file has it."""
    return replace(method.plan(work), trained=work.trains).cut()


def resolved(recipe: Recipe, spec: ModelSpec) -> Recipe:
    """The recipe with the options that depend on the model."""
    found: Any = module(recipe.method)
    if not hasattr(found, "resolved"):
        return recipe
    return replace(recipe, options=found.resolved(recipe.options, spec, recipe.calib_window))


def module(name: str) -> MethodModule:
    if name not in names():
        raise ConvertError("--method", f"one of {', '.join(names())}", name)
    found: Any = importlib.import_module(f"{__name__}.{name}")
    return found  # type: ignore[no-any-return]


def group_size(value: int | None, n_kv: int) -> int:
    """KV heads that share a latent; None is all of them.

    Raises:
        ConvertError: it does not divide n_kv.
    """
    group = n_kv if value is None else value
    if group < 1 or n_kv % group:
        divisors = ", ".join(str(d) for d in range(1, n_kv + 1) if n_kv % d == 0)
        raise ConvertError(
            "--group", f"a divisor of the model's {n_kv} KV heads ({divisors}) or all", str(group)
        )
    return group
