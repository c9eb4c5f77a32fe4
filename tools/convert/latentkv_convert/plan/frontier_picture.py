"""A frontier as a panel of a picture: divergence over bytes, a line per grouping of KV heads."""

from __future__ import annotations

from typing import Any

from ..frontier import Frontier, Line

LABELLED = 16384  # tokens; times at it stand beside a line's name


def draw(axis: Any, found: Frontier) -> None:
    """On a matplotlib axis. The chosen plan is ringed."""
    for index, line in enumerate(found.lines):
        sizes = [100 * point.bytes / found.full_bytes for point in line.points]
        nats = [point.predicted for point in line.points]
        colour = f"C{index}"
        chosen = index == found.chosen
        width = 2.2 if chosen else 1.2
        axis.plot(
            sizes, nats, marker="o", markersize=4, linewidth=width, color=colour, label=_label(line, found)
        )
        if chosen:
            own = line.own
            ring = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.5}
            axis.plot(100 * own.bytes / found.full_bytes, own.predicted, "o", color=colour, **ring)
    axis.set_yscale("log")
    axis.set_xlabel(f"cache at {found.context} tokens and added factors, % of f16", fontsize=9)
    axis.set_ylabel("predicted nats per token", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(which="major", alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.legend(fontsize=8, frameon=False, title=_title(found), title_fontsize=8)


def _label(line: Line, found: Frontier) -> str:
    us = line.own.us
    return line.name if us is None else f"{line.name}: {us[found.depths.index(LABELLED)]:.1f} us"


def _title(found: Frontier) -> str:
    """The legend's title: what its times are, and the time of full f16 rows."""
    if found.full_us is None or all(line.own.us is None for line in found.lines):
        return "KV heads that share a latent"
    full = f"full f16 {found.full_us[found.depths.index(LABELLED)]:.1f} us"
    return f"KV heads that share a latent: us a layer\nat {LABELLED} tokens, {found.gpu}\n({full})"
