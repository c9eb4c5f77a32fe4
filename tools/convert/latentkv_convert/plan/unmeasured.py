"""Budgets below all whose quality was ever measured: said before anything is computed."""

from __future__ import annotations

from ..errors import warn
from ..ir import ModelSpec
from ..recipe import Recipe
from ..rows import plan_sizes

LEAST = 0.085  # of the f16 cache: the smallest one in docs/results.md


def warn_of_budget(recipe: Recipe, spec: ModelSpec) -> None:
    """One line, where --kv-budget is a smaller share than LEAST."""
    budget = recipe.options.get("kv_budget")
    if budget is None:
        return
    share = budget.share
    if share is None:
        share = budget.size / plan_sizes.of_heads(spec, budget.n_ctx)["f16_total"]
    if share < LEAST:
        expected = f"{100 * LEAST:g}% or more, the least whose quality was ever measured"
        hint = "nobody knows what it loses: measure it with latentkv perplexity --decode --kld-against"
        warn("--kv-budget", expected, f"{100 * share:.2g}%", hint)
