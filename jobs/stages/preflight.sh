#!/usr/bin/env bash
# preflight: everything cheap that can be wrong, checked on every node before anything long starts.
set -euo pipefail
exec "$ATLASRL_PYTHON" -m atlasrl.preflight "$ATLASRL_RUN" "$ATLASRL_RANK"
