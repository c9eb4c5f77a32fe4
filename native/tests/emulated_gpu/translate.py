"""CUDA sources for a C++ compiler and the emulated GPU: translate.py FROM TO

Copies ops/cuda but the headers of instructions, which include/ has anew, and rewrites what is no C++: memory
that a launch asks for, named barriers and launches. Any other instruction by name is an error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ARGUMENT = r'"[nr]"\(((?:[^()]|\([^()]*\))*)\)'
NAMED_BARRIER = re.compile(
    rf'asm volatile\("bar\.(sync|arrive) (%?\d+), (%?\d+);" ::{ARGUMENT}(?:, {ARGUMENT})? : "memory"\);'
)
DYNAMIC_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
LAUNCH = re.compile(r"(\w+)<<<(.*?), (\w+), (\w+), stream>>>\(", re.DOTALL)
CHAIN = re.compile(r"\b((?:let_next_start|wait_for_previous)\(\));")
PREFETCH = re.compile(r'asm volatile\("prefetch\.global\.L2 \[%0\];" ::"l"\(.*\)\);')
EXP2 = 'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));'


def named_barrier(match: re.Match[str]) -> str:
    kind, *operands, first, second = match.groups()
    arguments = [first, second]
    id_, threads = (arguments[int(o[1:])] if o.startswith("%") else o for o in operands)
    return f"emulated::named_barrier_{kind}({id_}, {threads});"


def translated(source: str) -> str:
    source = DYNAMIC_SHARED.sub(r"auto* const \2 = static_cast<\1*>(emulated::dynamic_shared());", source)
    source = NAMED_BARRIER.sub(named_barrier, source)
    source = LAUNCH.sub(r'emulated_launch("\1", \1, \2, \3, \4, stream, ', source)
    source = CHAIN.sub(r"emulated::in_kernel(__func__), \1;", source)
    source = PREFETCH.sub(";", source)
    return source.replace(EXP2, "y = x < -126.0f ? 0.0f : std::exp2(x);")


def main() -> int:
    source, target = map(Path, sys.argv[1:])
    headers = Path(__file__).parent / "include/ops/cuda"
    own = {path.relative_to(headers) for path in headers.rglob("*")}
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if name in own or path.is_dir():
            continue
        text = translated(path.read_text(encoding="utf-8"))
        left = re.search(r"\basm\b.*|<<<.*", text)
        if left:
            print(f"[translate] expected no instruction by name in {path}; got {left[0]}", file=sys.stderr)
            return 2
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
