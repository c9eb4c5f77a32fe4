"""What people read: styles and tables that fit the window of a terminal, and plain lines everywhere else."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, JustifyMethod
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from latentkv.console.printable import printable, printable_lines

Block = str | Table

_WIDEST = 10_000  # columns of a page that nobody sees


def console(stream: TextIO, color: str = "auto") -> Console:
    """`color` is auto, always or never. auto: no escape code but in a terminal that knows them and without
    NO_COLOR."""
    styled = {"always": "standard", "never": None}.get(color, "auto")
    if color == "auto" and os.environ.get("NO_COLOR"):
        styled = None
    return Console(
        file=stream,
        force_terminal=stream.isatty(),
        color_system=styled,  # type: ignore[arg-type]
        markup=False,
        emoji=False,
        highlight=False,
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, rule: bool = True) -> Table:
    """The first `left` columns to the left, the others (numbers) to the right. Where a window is too narrow,
    headers of several words are folded first, and what has to be cut ends in …"""
    made = Table.grid(padding=(0, 2, 0, 0))
    for i, name in enumerate(header):
        folds = len(name.split()) > 1
        side: JustifyMethod = "left" if i < left else "right"
        made.add_column(justify=side, no_wrap=not folds, overflow="fold" if folds else "ellipsis")
    made.add_row(*map(Text, header), style="bold")
    if rule:
        made.add_row(*[Rule(characters="-", style="dim") for _ in header])
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def plain(block: Block) -> str:
    """The lines as a pipe receives them, unfolded."""
    if isinstance(block, str):
        return printable_lines(block)
    page = Console(file=io.StringIO(), width=_WIDEST, color_system=None, force_terminal=False)
    with page.capture() as drawn:
        page.print(block)
    return "\n".join(line.rstrip() for line in drawn.get().splitlines())


def show(*blocks: Block) -> None:
    """Prints texts and tables one below the other. In a terminal table cells are folded to its width."""
    screen = console(sys.stdout)
    for block in blocks:
        if isinstance(block, Table) and has_width(screen):
            screen.print(block)
        else:
            print(plain(block))


def has_width(screen: Console) -> bool:
    """Whether the stream is a terminal whose lines are folded and redrawn."""
    return screen.is_terminal and not screen.is_dumb_terminal
