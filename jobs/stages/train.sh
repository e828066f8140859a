#!/usr/bin/env bash
# train: verl's driver on node 0; its workers are placed by Ray on all nodes.
set -euo pipefail
exec "$ATLASRL_PYTHON" -m atlasrl.trainer "$ATLASRL_RUN" --attempt "$ATLASRL_ATTEMPT" \
    ${ATLASRL_RESUME_FROM:+--resume-from "$ATLASRL_RESUME_FROM"}
