"""Conversations of 30 turns with tools that grow to 20000 tokens: what is asked for was said long before.

    python bench/tasks/conversation.py MODEL [--problems 4] [--device cuda] [--save NAME]

Someone reads a stock list page by page with a tool, and after each page asks for something on an earlier one:
the shelf of a part, or an order by serial number. Every answer has to be the right call with the right
arguments; it may not be anything but a call, so format alone loses nothing: BFCL measures that. What the
conversation goes on with is the right call, so all caches read the same.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from tasks import run
from tasks.bfcl import calls_of
from tasks.task import Client, Outcome, Problem, Task, outcome

TURNS = 30
PARTS = 52  # on a page
COLUMNS = ("pages", "shelves", "orders")
ROOM = 768  # tokens of a turn
SYSTEM = "You look after a store of spare parts. Use the tools; answer from what they said."
NUMBER = {"type": "integer"}


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    tool("read_page", "Reads a page of the stock list.", page=NUMBER),
    tool(
        "order",
        "Orders more of a part.",
        part={"type": "string", "description": "as P-1234"},
        quantity=NUMBER,
    ),
    tool("tell_shelf", "Tells the user a shelf.", shelf={"type": "string", "description": "as A12"}),
]


def stock(rng: random.Random, turns: int) -> list[list[dict[str, str]]]:
    """Pages of parts. No number is on two of them."""
    count = PARTS * (turns // 2)
    names = rng.sample(range(1000, 10000), count)
    serials = rng.sample(range(100000, 1000000), count)
    parts = [
        {
            "part": f"P-{name}",
            "shelf": f"{rng.choice('ABCDEFGH')}{rng.randrange(10, 100)}",
            "serial": str(serial),
        }
        for name, serial in zip(names, serials, strict=True)
    ]
    return [parts[at : at + PARTS] for at in range(0, count, PARTS)]


def solve(client: Client, problem: Problem) -> list[Outcome]:
    rng = random.Random(problem.data["seed"])
    pages = stock(rng, problem.data["turns"])
    talk = Talk(client)
    for at, page in enumerate(pages):
        called = {"page": at + 1}
        shown = "\n".join(f"part {p['part']}, shelf {p['shelf']}, serial number {p['serial']}" for p in page)
        talk.call("pages", f"Read page {at + 1} of the stock list.", "read_page", called, shown, "I read it.")
        part = rng.choice(rng.choice(pages[: at + 1]))
        if at % 2:
            quantity = rng.randrange(2, 100)
            asked = f"Order {quantity} pieces of the part with serial number {part['serial']}."
            wanted = {"part": part["part"], "quantity": quantity}
            talk.call("orders", asked, "order", wanted, "ordered", "They are ordered.")
        else:
            asked, shelf = f"Tell me the shelf of part {part['part']}.", part["shelf"]
            talk.call("shelves", asked, "tell_shelf", {"shelf": shelf}, "told", f"It is on shelf {shelf}.")
    return talk.outcomes


class Talk:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        self.outcomes: list[Outcome] = []

    def judged(self, column: str, right: bool, answer: dict[str, Any], wanted: Any) -> None:
        made = outcome(
            float(right), answer, answer["choices"][0]["message"], "" if right else f"wanted {wanted}"
        )
        self.outcomes.append(Outcome(made.score, made.read, made.written, made.said, made.why, column))

    def call(
        self, column: str, asked: str, name: str, wanted: dict[str, Any], result: str, reply: str
    ) -> None:
        self.messages.append({"role": "user", "content": asked})
        answer = self.client.chat(
            self.messages, 64, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        )
        try:
            right = calls_of(answer["choices"][0]["message"]) == [(name, wanted)]
        except ValueError:
            right = False
        self.judged(column, right, answer, {name: wanted})
        function = {"name": name, "arguments": json.dumps(wanted)}
        call = {"id": f"call_{len(self.messages)}", "type": "function", "function": function}
        self.messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
            {"role": "assistant", "content": reply},
        ]


def task(args: Any) -> Task:
    count = args.problems or 4
    made = [
        Problem(f"conversation {seed}", "turns", {"seed": seed, "turns": args.turns}) for seed in range(count)
    ]
    return Task(
        "conversation",
        f"{args.turns} turns of a conversation with tools;",
        {"turns": 4096 + args.turns * ROOM},
        made,
        solve,
        COLUMNS,
    )


def main() -> int:
    parser = run.parser(__doc__)
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of a conversation (default: {TURNS})")
    return run.main(parser.parse_args(), task)


if __name__ == "__main__":
    sys.exit(main())
