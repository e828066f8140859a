#!/usr/bin/env bash
# cast: a clean BF16 copy of the input checkpoint, each shard a Ray task on the cluster that is up anyway. Finished
# shards are proven and kept, so a killed cast goes on and a complete one is done in a second.
set -euo pipefail
exec "$ATLASRL_PYTHON" -m ckpt_tools cast "$ATLASRL_MODEL_INPUT" "$ATLASRL_MODEL" --mtp drop --ray
