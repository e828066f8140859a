"""A trainer without weights that keeps the contract of `python -m atlasrl.trainer`: steps, metrics, checkpoints, codes.

LIGHT_STEP_SECONDS sets its pace, LIGHT_CHECKPOINT_MB the size of its checkpoints. LIGHT_CRASH_AFTER=N kills it with
SIGKILL after step N of each attempt.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

from atlasrl import checkpoints
from atlasrl.rundir import RunDir


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--resume-from", type=Path)
    options = parser.parse_args()
    run = RunDir(options.run)
    attempt, recipe = run.attempt(options.attempt), json.loads(run.plan.read_text())["recipe"]
    done = json.loads((options.resume_from / "state.json").read_text())["step"] if options.resume_from else 0
    saved, last = done, done + int(os.environ.get("LIGHT_CRASH_AFTER", 10**9))
    for step in range(done + 1, recipe["steps"] + 1):
        if attempt.stop_request.exists():
            if json.loads(attempt.stop_request.read_text())["save"] and step - 1 > saved:
                save(run, step - 1, recipe["checkpoint"]["keep"])
            return 85
        seconds = float(os.environ.get("LIGHT_STEP_SECONDS", 0.5))
        time.sleep(seconds)  # the work of a step
        with attempt.metrics.open("a") as file:
            data = {"critic/score/mean": step / recipe["steps"], "timing_s/step": seconds}
            file.write(json.dumps({"step": step, "data": data}) + "\n")
        if step % recipe["checkpoint"]["save_every"] == 0 or step == recipe["steps"]:
            save(run, step, recipe["checkpoint"]["keep"])
            saved = step
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
    return 0


def save(run: RunDir, step: int, keep: int) -> None:
    path = checkpoints.begin(run, step)
    path.mkdir(parents=True)
    (path / "weights").write_bytes(bytes(int(os.environ.get("LIGHT_CHECKPOINT_MB", 0)) * 2**20))
    (path / "state.json").write_text(json.dumps({"step": step}))
    saved = checkpoints.seal(path, backend="fsdp2", world_size=1)
    checkpoints.prune(run, keep)
    run.record("checkpoint", step=step, path=str(path), bytes=saved.size, seconds=0.0, removed=[])


if __name__ == "__main__":
    try:
        code = main()
    except OSError as problem:
        print(f"error: {problem}", flush=True)
        code = 1
    raise SystemExit(code)
