#!/usr/bin/env bash
# clang-format over every C++ and CUDA file of native/ and bench/; arguments are passed on (-i, or --dry-run -Werror).
set -euo pipefail
cd "$(dirname "$0")/.."
clang_format="${BIN:+$BIN/}clang-format"
find native bench -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
    xargs -0 "$clang_format" --style=file "$@"
