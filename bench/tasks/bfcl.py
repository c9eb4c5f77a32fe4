"""BFCL v4: calls of functions that a question needs, and conversations whose calls change something.

    python bench/tasks/bfcl.py MODEL [--problems 50] [--device cuda --parallel 16] [--save NAME]

It wants `pip install 'latentkv[tasks]'` and `pip install --no-deps bfcl-eval==2026.3.23`, whose questions,
functions and checkers are used. `simple`, `multiple` and `parallel` offer one function, several, or want
several calls at once. `multi-turn` is a conversation, right where all functions end in the right state.
"""

from __future__ import annotations

import json
import re
import sys
import types
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from tasks import run
from tasks.backend import Backend, called
from tasks.task import Client, Outcome, Problem, Refused, Task, outcome

GROUPS = {"simple": 2048, "multiple": 3072, "parallel": 3072, "multi-turn": 24576}
FILES = {
    "simple": "simple_python",
    "multiple": "multiple",
    "parallel": "parallel",
    "multi-turn": "multi_turn_base",
}
LIMIT = 512  # tokens of an answer
STEPS = 20  # answers to one message of a conversation
DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}


@cache
def data() -> Path:
    found = util.find_spec("bfcl_eval")
    if found is None or not found.submodule_search_locations:
        raise SystemExit(
            "error: [bfcl] expected the package bfcl-eval; got none; pip install --no-deps bfcl-eval"
        )
    return Path(next(iter(found.submodule_search_locations))) / "data"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def problems(group: str) -> list[Problem]:
    name = f"BFCL_v4_{FILES[group]}.json"
    truth = {each["id"]: each["ground_truth"] for each in lines(data() / "possible_answer" / name)}
    return [
        Problem(each["id"], group, {"entry": each, "truth": truth[each["id"]]})
        for each in lines(data() / name)
    ]


def tool(function: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's form: their names have no dots, and types are JSON's."""
    of_json = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}

    def cast(schema: Any) -> Any:
        if isinstance(schema, list):
            return [cast(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        made = {key: cast(value) for key, value in schema.items()}
        if isinstance(made.get("type"), str):
            made["type"] = of_json.get(made["type"], made["type"])
        return made

    described = {"name": re.sub(r"\.", "_", function["name"]), "description": function["description"]}
    return {"type": "function", "function": described | {"parameters": cast(function["parameters"])}}


@cache
def checker() -> Any:
    """The package's. It looks up whether a model's names have dots in a table that imports every vendor's
    client: a table of one row takes its place."""
    table: Any = types.ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = {"model": types.SimpleNamespace(underscore_to_dot=True)}
    sys.modules.setdefault(table.__name__, table)
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    return lambda entry, calls, truth, name: ast_checker(
        entry["function"], calls, truth, Language.PYTHON, name, "model"
    )


def calls_of(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Raises ValueError where arguments are no JSON object."""
    found = []
    for each in message.get("tool_calls") or []:
        arguments = json.loads(each["function"]["arguments"] or "{}")
        if not isinstance(arguments, dict):
            raise ValueError(f"no object: {arguments!r}")
        found.append((each["function"]["name"], arguments))
    return found


def asked_once(client: Client, problem: Problem) -> Outcome:
    entry = problem.data["entry"]
    offered = [tool(each) for each in entry["function"]]
    answer = client.chat(entry["question"][0], LIMIT, tools=offered, parallel_tool_calls=True)
    message = answer["choices"][0]["message"]
    try:
        calls = [{name: arguments} for name, arguments in calls_of(message)]
        found = checker()(entry, calls, problem.data["truth"], FILES[problem.group])
        why = "" if found["valid"] else str(found["error"])
    except ValueError as error:
        why = str(error)
    return outcome(float(not why), answer, message, why)


def conversation(client: Client, problem: Problem) -> Outcome:
    entry, truth = problem.data["entry"], problem.data["truth"]
    documents = [
        data() / "multi_turn_func_doc" / f"{DOCUMENTS[name]}.json" for name in entry["involved_classes"]
    ]
    offered = [tool(each) for document in documents for each in lines(document)]
    messages: list[dict[str, Any]] = []
    turns: list[list[list[str]]] = []
    read = written = 0
    why = ""
    try:
        with Backend(entry, truth) as backend:
            for asked in entry["question"]:
                messages += asked
                turns.append([])
                for _ in range(STEPS):
                    answer = client.chat(messages, LIMIT, tools=offered, parallel_tool_calls=True)
                    read = max(read, answer["usage"]["prompt_tokens"])
                    written += answer["usage"]["completion_tokens"]
                    message = answer["choices"][0]["message"]
                    messages.append(message)
                    calls = [called(*each) for each in calls_of(message)]
                    if not calls:
                        break
                    turns[-1].append(calls)
                    results = zip(message["tool_calls"], backend.ask({"calls": calls}), strict=True)
                    messages += [
                        {"role": "tool", "tool_call_id": call["id"], "content": result}
                        for call, result in results
                    ]
                else:
                    raise ValueError(f"more than {STEPS} answers to one message")
            why = backend.ask({"check": turns})
    except (Refused, TimeoutError, ValueError) as error:
        why = str(error)
    return Outcome(float(not why), read, written, messages, why)


def solve(client: Client, problem: Problem) -> list[Outcome]:
    return [(conversation if problem.group == "multi-turn" else asked_once)(client, problem)]


def task(args: Any) -> Task:
    made = [each for group in GROUPS for each in problems(group)]
    return Task("bfcl", "BFCL v4;", GROUPS, made, solve)


if __name__ == "__main__":
    sys.exit(run.main(run.parser(__doc__).parse_args(), task))
