#!/usr/bin/env bash
# turboquant 0.2.0 and turbokv 0.1.0 are packages of different authors, and both install the module `turboquant`. pip says nothing of it: whichever
# comes last writes over files of the other, `pip check` finds no fault, and removing one takes the other's files along.
# Seen: `import turboquant` is the module of the package that was installed last; after `pip uninstall turbokv` turboquant is listed but does not import.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; bin=$folder/venv/bin
module() { find "$folder/venv/lib" -path '*/site-packages/turboquant/__init__.py' -exec sha256sum {} + | cut -c1-16; }
"$bin/pip" install -q --no-deps turboquant==0.2.0; first=$(module)
"$bin/pip" install -q --no-deps turbokv==0.1.0; second=$(module)
echo "turboquant/__init__.py of turboquant: $first; once turbokv is installed: $second"
[[ -n $first && -n $second && $first != "$second" ]]
"$bin/pip" uninstall -q -y turbokv
"$bin/pip" list 2>/dev/null | grep -q '^turboquant '
echo "turbokv removed, turboquant listed; its __init__.py: $(module | grep . || echo gone)"
[[ -z $(module) ]]
