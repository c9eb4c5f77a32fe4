"""What the user asked for, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finetune:
    """LoRA recovery (recover/lora.py)."""

    text: Path
    steps: int = 200
    lora_rank: int = 32
    lr: float = 2e-4
    lora_on: str = "ab"  # A alone, or A and the up-projections


@dataclass(frozen=True)
class Recipe:
    source: Path  # a checkpoint directory or a GGUF
    output: Path
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)  # the method's own, by argparse name
    rotate: bool = True
    center: bool = True
    seed: int = 0
    outtype: str | None = None  # of the weights; None: the source's own
    factor_type: str | None = None  # of A; None: that of the weights
    imatrix: bool | None = None  # for K-quants; None: where there is a text
    sidecar: bool = False  # only what a latent cache adds to the source, a GGUF
    calib: tuple[Path, ...] = ()  # texts, read as one
    calib_tokens: int = 65536
    calib_window: int = 2048
    fisher_tokens: int = 32768  # a quarter with --quick, where none are asked for
    device: str = "cpu"
    cache: bool = True
    pre: str | None = None
    plot: bool = True
    finetune: Finetune | None = None

    @property
    def report(self) -> Path:
        """OUT.report.json of OUT.gguf."""
        return self.output.parent / f"{self.output.stem}.report.json"

    @property
    def picture(self) -> Path:
        """OUT.ranks.png of OUT.gguf."""
        return self.output.parent / f"{self.output.stem}.ranks.png"

    @property
    def draws(self) -> bool:
        """A picture, if there are ranks to see in it."""
        return self.plot and self.method != "none"

    @property
    def outputs(self) -> tuple[Path, ...]:
        """Every file that may be written, in that order."""
        return (self.output, self.report, *((self.picture,) if self.draws else ()))

    def text(self) -> str:
        """The choices that shape the cache, as JSON: the `latentkv.source.recipe` key."""
        chosen = {"method": self.method, "rotate": self.rotate, "seed": self.seed, **self.options}
        if chosen.get("scales") == "segment":  # as in files from before there was a choice
            del chosen["scales"]
        if not chosen.get("polish"):
            chosen.pop("polish", None)
        if not self.center:
            chosen["center"] = False
        if self.finetune is not None:
            chosen["finetune"] = {**asdict(self.finetune), "text": self.finetune.text.name}
        return json.dumps(chosen, sort_keys=True, default=str)
