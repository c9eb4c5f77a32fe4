"""What stands behind the functions of BFCL's conversations, in a process with limits.

    python bench/tasks/backend.py

The first line that it reads is the problem. Each further one is JSON: {"calls": [call, …]} is answered by
their results, {"check": turns} by why the conversation failed, or "". The package evaluates calls as Python,
so they are made of checked names and literals, and the process has no network, no files and little time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

SECONDS = 60  # of processor time


class Backend:
    """The process, from outside."""

    def __init__(self, entry: dict[str, Any], truth: list[list[str]]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.ask({"entry": entry, "truth": truth})

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self, what: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            raise TimeoutError("the functions took too long") from None


def called(name: str, arguments: dict[str, Any]) -> str:
    """A call as Python; names are identifiers, so nothing but literals is evaluated.

    >>> called("cd", {"folder": "a'b"})
    'cd(folder="a\\'b")'
    """
    if not all(word.isidentifier() for word in (name, *arguments)):
        raise ValueError(f"no such function: {name}({', '.join(arguments)})")
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

    from tasks import limits

    given = json.loads(sys.stdin.readline())
    entry, truth = given["entry"], given["truth"]
    for name in entry["involved_classes"]:
        __import__(CLASS_FILE_PATH_MAPPING[name])
    limits.confine(SECONDS)
    print("true", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "calls" in asked:
            config, classes = entry["initial_config"], entry["involved_classes"]
            answer: Any = execute_multi_turn_func_call(asked["calls"], config, classes, "model", entry["id"])[
                0
            ]
        else:
            found = multi_turn_checker(asked["check"], truth, entry, "multi_turn_base", "model")
            answer = "" if found["valid"] else found["error_message"]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
