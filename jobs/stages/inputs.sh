#!/usr/bin/env bash
# inputs: let the recipe's script make model and data from what is installed, once per run. Node 0 only.
set -euo pipefail
out=$ATLASRL_RUN/input
if [ -z "$ATLASRL_INPUT_SCRIPT" ]; then echo "skipped: the recipe names its model and data"; exit 0; fi
if [ -d "$out" ]; then echo "skipped: $out was made before"; exit 0; fi
rm -rf "$out.part"
"$ATLASRL_PYTHON" "$ATLASRL_INPUT_SCRIPT" --out "$out.part"
mv "$out.part" "$out"
