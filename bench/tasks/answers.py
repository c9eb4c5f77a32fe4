"""What a model has answered so far with one cache: a file that grows by a line a problem."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.task import Outcome, Problem

Solved = dict[tuple[str, str], list[Outcome]]  # by group and name of a problem


@dataclass(frozen=True)
class Answers:
    """model: whose answers they are; those of another file of the same name are forgotten."""

    path: Path
    model: Path

    @property
    def head(self) -> str:
        stat = self.model.stat()
        return json.dumps({"model": self.model.name, "bytes": stat.st_size, "changed": int(stat.st_mtime)})

    def read(self) -> Solved:
        """All whole lines; the last may have been cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text(encoding="utf-8").splitlines(True) if self.path.exists() else []
        if not lines or lines[0].rstrip() != self.head:
            lines = [self.head + "\n"]
        whole = [line for line in lines if line.endswith("\n")]
        self.path.write_text("".join(whole), encoding="utf-8")
        found: Solved = {}
        for line in whole[1:]:
            each = json.loads(line)
            found[each["group"], each["problem"]] = [Outcome(**outcome) for outcome in each["outcomes"]]
        return found

    def add(self, problem: Problem, outcomes: list[Outcome], seconds: float) -> None:
        """seconds: since the first problem was asked."""
        said = {"problem": problem.name, "group": problem.group, "seconds": round(seconds, 2)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(said | {"outcomes": [asdict(each) for each in outcomes]}) + "\n")
