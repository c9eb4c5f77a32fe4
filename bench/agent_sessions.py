"""Agents at a server: conversations with tools that grow side by side, and which tokens are computed twice.

    python bench/agent_sessions.py [model.gguf] [--turns 20] [--to 20000] [--cases one,two,…]

Two agents share a system prompt and tools. In each turn one calls a tool (every fourth: it tells something),
streamed, and gets a result of 0.2 to 2 times the mean length. A token of a prompt is new where the
conversation has not had it before: in the turn before, or, in a second agent's first one, in the system
prompt and the tools. Without a model the demo model is converted with a longer context, and for `window` with
sliding windows in its layers: what is counted does not depend on what a model says.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import record
from command import arguments
from record import Column
from serving import started

sys.path.insert(0, str(record.ROOT / "python"))
from latentkv.chat.formats import CHATML_TOOLS

DEMO = record.ROOT / "models" / "demo"
WORDS = (DEMO / "sample-val.txt").read_text(encoding="utf-8").split()
COLUMNS = [
    Column("case", "server"),
    Column("turns", "turns"),
    Column("longest", "longest prompt"),
    Column("new", "new tokens"),
    Column("computed", "computed"),
    Column("ratio", "computed / new", ".2f"),
    Column("store", "kept in the store", ".1f", "MiB"),
    Column("whole", "as whole copies", ".1f", "MiB"),
]


@dataclass(frozen=True)
class Case:
    """options: of the server, {half}: cells for one agent alone; others: clients between the turns."""

    what: str
    options: tuple[str, ...] = ()
    sliding: bool = False
    others: bool = False
    restarts: bool = False
    in_turn: bool = False  # the agents, one after the other


CASES = {
    "one": Case("`--parallel 1`", ("-np", "1")),
    "two": Case("`--parallel 2`", ("-np", "2")),
    "four": Case("`--parallel 4`, other clients between", ("-np", "4"), others=True),
    "small": Case("a cache of one agent", ("-np", "2", "-c", "{half}"), in_turn=True),
    "window": Case("sliding windows", ("-np", "2"), sliding=True),
    "exact": Case(
        "`--sink 4 --recent 64`, q4 rows", ("-np", "2", "--kv", "q4", "--sink", "4", "--recent", "64")
    ),
    "restart": Case(
        "`--cache-dir`, restarted after each half", ("-np", "2", "--cache-dir", "{folder}"), restarts=True
    ),
}


def text(rng: random.Random, n_words: int) -> str:
    at = rng.randrange(len(WORDS) - n_words - 1)
    return " ".join(WORDS[at : at + n_words])


def tools(rng: random.Random) -> list[dict[str, Any]]:
    made = []
    for name in ("read_file", "write_file", "run_command", "search", "list_folder"):
        path = {"type": "string", "maxLength": 24, "description": text(rng, 40)}
        many = {"type": "integer", "minimum": 0, "maximum": 99, "description": text(rng, 20)}
        schema = {
            "type": "object",
            "properties": {"path": path, "count": many},
            "required": ["path", "count"],
        }
        made.append(
            {
                "type": "function",
                "function": {"name": name, "description": text(rng, 60), "parameters": schema},
            }
        )
    return made


@dataclass
class Agent:
    """A conversation. `per_turn`: words that a turn adds, on average."""

    client: Any
    seed: int
    shared: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    per_turn: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    n_known: int = 0  # tokens of the conversation so far
    new: int = 0
    computed: int = 0
    turns: int = 0
    known_before: int = 0
    told: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        task = {"role": "user", "content": f"Task {self.seed}: {text(self.rng, 30)}"}
        self.messages = [*self.shared, task]

    def turn(self) -> None:
        tells = self.turns % 4 == 3
        stream = self.client.chat.completions.create(
            model="default",
            messages=self.messages,
            tools=self.tools,
            tool_choice="auto" if tells else "required",
            parallel_tool_calls=False,
            max_tokens=60 if tells else 160,
            temperature=1.0,
            seed=self.rng.randrange(1 << 30),
            stream=True,
            stream_options={"include_usage": True},
        )
        message, usage = joined(stream)
        self.messages.append(message)
        cached = usage.prompt_tokens_details.cached_tokens
        self.computed += usage.prompt_tokens - cached
        self.known_before = self.n_known
        self.new += usage.prompt_tokens - self.n_known
        self.n_known = usage.prompt_tokens + usage.completion_tokens
        self.turns += 1
        self.told.append((usage.prompt_tokens, cached, usage.prompt_tokens - self.known_before))
        more = text(self.rng, int(self.per_turn * self.rng.choice((0.2, 0.5, 0.8, 1.0, 1.5, 2.0))))
        calls = message.get("tool_calls") or []
        if calls:
            self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": more} for call in calls]
        else:
            self.messages.append({"role": "user", "content": more})


def joined(stream: Any) -> tuple[dict[str, Any], Any]:
    """The message as a client puts it together, and the usage."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                message["content"] = (message["content"] or "") + choice.delta.content
            for part in choice.delta.tool_calls or []:
                calls = message.setdefault("tool_calls", [])
                if part.index == len(calls):
                    function = {"name": part.function.name, "arguments": ""}
                    calls.append({"id": part.id, "type": "function", "function": function})
                calls[part.index]["function"]["arguments"] += part.function.arguments or ""
    return message, usage


def play(address: str, agents: list[Agent], turns: int, case: Case) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=None)
    rng = random.Random(turns)
    for agent in agents:
        agent.client = client
    for _ in range(turns):
        if case.others:
            for _ in range(2):
                client.completions.create(model="default", prompt=text(rng, 100), max_tokens=8)
        if case.in_turn:
            for agent in agents:
                agent.turn()
            continue
        with ThreadPoolExecutor() as beside:
            list(beside.map(Agent.turn, agents))


def kept(address: str) -> tuple[float, float]:
    """MiB in the store, and what they would be if no sequence shared with another."""
    import httpx

    found = {}
    for line in httpx.get(f"{address}/metrics").text.splitlines():
        if line.startswith("latentkv:store"):
            name, value = line.split()
            found[name.removeprefix("latentkv:store_")] = float(value)
    used = found.get("ram_bytes", 0) + found.get("disk_bytes", 0)
    return used / 2**20, found.get("unshared_bytes", 0) / 2**20


def measured(args: argparse.Namespace, case: Case, model: Path) -> dict[str, Any]:
    rng = random.Random(1)
    shared = [{"role": "system", "content": text(rng, args.shared)}]
    offered = tools(rng)
    # a turn has some 80 tokens beside its result, a word 1.9, the tools 700
    per_turn = int(((args.to - 1.9 * args.shared - 700) / args.turns - 80) / 1.9)
    if per_turn < 10:
        raise SystemExit(f"error: [--to] expected room for {args.turns} turns; got {args.to}")
    agents = [Agent(None, seed, shared, offered, per_turn) for seed in range(2)]
    half = str(args.to * 3 // 2)
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w", suffix=".jinja") as jinja:
        jinja.write(CHATML_TOOLS)
        jinja.flush()
        options = [option.format(half=half, folder=folder) for option in case.options]
        if "-c" not in options:
            options += ["-c", str(args.to * 4)]
        options += ["-t", str(args.threads), "--chat-template-file", jinja.name]
        for part in range(2 if case.restarts else 1):
            with started(args.command, str(model), options) as (address, _):
                play(address, agents, args.turns // (2 if case.restarts else 1), case)
                used, whole = kept(address)
                if part == 0:
                    agents[1].new -= begun(address, agents)
    if args.verbose:
        for agent in agents:
            for prompt, cached, new in agent.told:
                print(f"agent {agent.seed}: prompt {prompt}, cached {cached}, new {new}", file=sys.stderr)
    new, computed = sum(agent.new for agent in agents), sum(agent.computed for agent in agents)
    return {
        "case": case.what,
        "turns": sum(agent.turns for agent in agents),
        "longest": max(agent.n_known for agent in agents),
        "new": new,
        "computed": computed,
        "ratio": computed / new,
        "store": used,
        "whole": whole,
    }


def begun(address: str, agents: list[Agent]) -> int:
    """Tokens that both conversations begin with: those of a prompt without its task."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    done = client.chat.completions.create(
        model="default",
        messages=[*agents[0].shared, {"role": "user", "content": "Task"}],
        tools=agents[0].tools,
        max_tokens=1,
    )
    return int(done.usage.prompt_tokens) - 6


def demo(command: list[str], folder: Path, sliding: bool, n_ctx: int) -> Path:
    """The demo model for longer texts than it was trained on."""
    source, path = folder / f"source-{sliding}", folder / f"demo-{sliding}.gguf"
    source.mkdir()
    for file in DEMO.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = n_ctx
    if sliding:
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 256}
    (source / "config.json").write_text(json.dumps(config))
    subprocess.run(
        [*command, "convert", str(source), "-o", str(path), "--method", "none", "--no-plot"], check=True
    )
    return path


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="GGUF (default: the demo model)")
    parser.add_argument("--turns", type=int, default=20, help="of each agent (default: 20)")
    parser.add_argument(
        "--to", type=int, default=20000, help="tokens of a conversation at its end (default: 20000)"
    )
    parser.add_argument("--shared", type=int, default=800, help="words of the system prompt (default: 800)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"(default: {','.join(CASES)})")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--command", nargs="+", default=[sys.executable, "-m", "latentkv"], help="latentkv's")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for each turn")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models: dict[bool, Path] = {}
        for name in args.cases.split(","):
            case = CASES[name]
            if args.model is None and case.sliding not in models:
                models[case.sliding] = demo(args.command, Path(folder), case.sliding, args.to * 2)
            rows.append(measured(args, case, args.model or models[case.sliding]))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        note = "Two agents that share system prompt and tools: tokens computed beside new ones, kept bytes"
        command = " ".join(["python", "bench/agent_sessions.py", *sys.argv[1:]])
        record.save(args.out, command=command, columns=COLUMNS, rows=rows, note=note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
