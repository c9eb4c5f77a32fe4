"""Lists the public names and arguments of llama-cpp-python, for tests/python/llama/test_llama_cpp_python.py.

pip download --no-deps --no-binary :all: llama-cpp-python     # and unpack it
python tools/llama_cpp_names.py llama_cpp_python-X.Y.Z/llama_cpp > tests/python/llama/llama_cpp_names.json
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

FILES = ("llama.py", "llama_grammar.py", "llama_cache.py", "llama_speculative.py")
CLASSES = {
    "Llama",
    "LlamaState",
    "LlamaGrammar",
    "LogitsProcessorList",
    "StoppingCriteriaList",
    "MinTokensLogitsProcessor",
    "BaseLlamaCache",
    "LlamaRAMCache",
    "LlamaDiskCache",
    "LlamaDraftModel",
    "LlamaPromptLookupDecoding",
}
SPECIAL = {"__init__", "__call__", "__getstate__", "__setstate__"}


def methods(node: ast.ClassDef) -> dict[str, list[str]]:
    """Public functions and properties with their arguments, self left out."""
    found = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and (not item.name.startswith("_") or item.name in SPECIAL):
            arguments = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs]
            found[item.name] = [a.arg for a in arguments if a.arg not in ("self", "cls")]
    return found


def main() -> None:
    """Writes JSON to standard output."""
    root = Path(sys.argv[1])
    version = re.search(r'__version__ = "(.*)"', (root / "__init__.py").read_text(encoding="utf-8"))
    classes = {}
    for name in FILES:
        for node in ast.parse((root / name).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                classes[node.name] = methods(node)
    json.dump({"version": version and version[1], "classes": classes}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
