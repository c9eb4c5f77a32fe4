"""A server under load: streams that come and go, answers that have to be those of a quiet server, memory.

    python bench/serving.py model.gguf [--streams 16] [--minutes 10] [--leave 0.2] [--parallel 8]

Prompts share beginnings of different lengths, so slots lend and reuse; every fifth client goes away at a
random moment, some before their answer begins. Answers are greedy. With weights and rows of f32 they equal
those that the same server gave one by one, where no tokens are kept exact (--no-windows): those of one piece
of a prompt see each other exactly, and pieces are cut at other places beside other answers. In coarser files
two batches of other sizes round differently, and answers part where two tokens are equally likely (--share
says how many have to agree).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import record
from command import arguments
from record import Column

LOAD = [
    Column("streams", "clients at once"),
    Column("slots", "sequences"),
    Column("answers", "answers"),
    Column("different", "other than alone"),
    Column("left", "clients gone"),
    Column("busy", "sequences lost"),
    Column("first", "resident at first", ".0f", "MiB"),
    Column("third", "after a third", ".0f", "MiB"),
    Column("last", "at last", ".0f", "MiB"),
]
STARTS = 300  # seconds that a server may take
TEXT = "The clerk of the town wrote numbers into a book, and the book went to the mill. "


@contextmanager
def started(command: list[str], model: str, options: list[str]) -> Iterator[tuple[str, int]]:
    """Address and process of a server that is up. command: how latentkv is called."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([*command, "serve", model, "--port", str(port), *options])
    over = time.monotonic() + STARTS
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > over:
                    raise SystemExit("error: the server did not start") from None
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def server(args: argparse.Namespace) -> AbstractContextManager[tuple[str, int]]:
    """The server that the arguments ask for."""
    options = ["-np", str(args.parallel), "-c", str(args.ctx_size), "--temp", "0"]
    options += ["-t", str(args.threads), "-ngl", str(args.gpu_layers)]
    options += ["--kv", args.kv] if args.kv else []
    options += ["--sink", "0", "--recent", "0"] if args.no_windows else []
    return started([sys.executable, "-m", "latentkv"], args.model, options)


def resident(pid: int) -> float:
    """MiB"""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024


def prompts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return [f"{TEXT * rng.randint(1, 12)}Then {rng.randint(0, 99)} of them said" for _ in range(count)]


async def read(client: Any, prompt: str, tokens: int, leave_after: float | None) -> str | None:
    """The answer, or None where its client left."""
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    said: list[str] = []

    async def whole() -> None:
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            if stream.status_code != 200:
                raise SystemExit(
                    f"error: [serving] expected an answer; got {(await stream.aread()).decode()}"
                )
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    said.append(json.loads(line[6:])["choices"][0]["text"])

    try:
        await asyncio.wait_for(whole(), leave_after)
    except asyncio.TimeoutError:
        return None
    return "".join(said)


async def load(args: argparse.Namespace, address: str, pid: int) -> dict[str, Any]:
    import httpx

    asked = prompts(args.seed, args.prompts)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.streams)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
        alone = {prompt: await read(client, prompt, args.tokens, None) for prompt in asked}
        end = time.monotonic() + 60 * args.minutes
        counts = {"answers": 0, "different": 0, "left": 0}
        memory: list[float] = []

        async def stream(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < end:
                prompt = rng.choice(asked)
                leave = rng.uniform(0, 0.8) if rng.random() < args.leave else None
                answer = await read(client, prompt, args.tokens, leave)
                counts["left" if answer is None else "answers"] += 1
                if answer is not None and answer != alone[prompt]:
                    counts["different"] += 1

        async def watch() -> None:
            while time.monotonic() < end:
                memory.append(resident(pid))
                await asyncio.sleep(max(0.5, 60 * args.minutes / 60))

        await asyncio.gather(watch(), *(stream(args.seed + 1 + at) for at in range(args.streams)))
        await asyncio.sleep(1)
        slots = (await client.get("/slots")).json()
        one_more = await read(client, asked[0], args.tokens, None)
    counts["different"] += one_more != alone[asked[0]]
    tenth = max(1, len(memory) // 10)  # of ten minutes, one
    return counts | {
        "streams": args.streams,
        "slots": len(slots),
        "busy": sum(slot["is_processing"] for slot in slots),
        "first": float(np.mean(memory[:tenth])),
        "third": float(np.mean(memory[len(memory) // 3 :][:tenth])),
        "last": float(np.mean(memory[-tenth:])),
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("model", help="GGUF")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--leave", type=float, default=0.2, help="share of clients that go away")
    parser.add_argument("--share", type=float, default=1.0, help="of answers that have to agree")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("-np", "--parallel", type=int, default=8)
    parser.add_argument("-c", "--ctx-size", type=int, default=8192)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=0)
    parser.add_argument("--kv", default="")
    parser.add_argument("--no-windows", action="store_true", help="no exact tokens: --sink 0 --recent 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    with server(args) as (address, pid):
        row = asyncio.run(load(args, address, pid))
    print(json.dumps(row, indent=1))
    if args.out:
        record.save(args.out, command=shown(), columns=LOAD, rows=[row], note=str(__doc__).splitlines()[0])
    agree = 1 - row["different"] / max(1, row["answers"])
    return 0 if agree >= args.share and not row["busy"] and row["last"] - row["third"] < 8 else 1


def shown() -> str:
    return " ".join(["python", "bench/serving.py", Path(sys.argv[1]).name, *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
