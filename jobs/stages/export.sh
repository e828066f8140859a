#!/usr/bin/env bash
# export: the newest complete checkpoint as a Hugging Face folder, verified and loaded once.
set -euo pipefail
exec "$ATLASRL_PYTHON" -m atlasrl.trainer.export "$ATLASRL_RUN" "$ATLASRL_MODEL"
