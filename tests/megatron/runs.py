"""Small Megatron runs through the real trainer, one process per attempt, on a Ray of the test's own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

from atlasrl import checkpoints
from atlasrl import plan as plans
from atlasrl import recipe as recipes
from atlasrl import site as sites
from atlasrl.rundir import RunDir, read_json_lines

PYLIB = Path(__file__).parents[2] / "pylib"
DEADLINE = 400
LARGE = {
    "device": "npu",
    "backend": "megatron",
    "nodes": 32,
    "devices_per_node": 8,
    "model": {"path": "/models/absent"},
    "data": {"train": "/data/absent.parquet"},
    "rollout": {"tensor": 8, "expert": 64},
    "dapo": {"train_batch_size": 128, "mini_batch_size": 128, "micro_batch_size": 2, "max_gen_batches": 1},
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
}


def small_recipe(folder: Path, changes: dict | None = None, **parallel) -> recipes.Recipe:
    """A large recipe with `parallel`, shrunk into `folder`; `changes` go on top of the small one."""
    return shrunk(recipes.parse({**LARGE, "parallel": parallel}, "large"), folder, changes)


def shrunk(large: recipes.Recipe, folder: Path, changes: dict | None = None) -> recipes.Recipe:
    from atlasrl import shrink

    small = shrink.rehearse(large, folder)
    small.write(folder)
    tree = small.recipe.model_dump(mode="json")
    tree["model"]["cast_path"] = tree["model"]["path"]  # written in its final form: nothing to cast
    for key, value in (changes or {}).items():
        *sections, name = key.split(".")
        section = tree
        for part in sections:
            section = section[part]
        section[name] = value
    return recipes.parse(tree, "small")


def start_run(path: Path, recipe: recipes.Recipe) -> RunDir:
    run = RunDir(path)
    run.path.mkdir(parents=True)
    plan = plans.make(
        recipe, sites.load("local"), run, nodes=1, devices_per_node=recipe.nodes * recipe.devices_per_node
    )
    run.plan.write_text(plan.to_json())
    Path(str(plan.environment["RAY_AUTH_TOKEN_PATH"].value)).write_text(secrets.token_hex(32))
    run.checkpoints.mkdir()
    return run


class Attempt:
    """One `python -m atlasrl.trainer` process with a Ray of its own."""

    def __init__(self, run: RunDir, number: int, *, resume_from: Path | None = None, **environment):
        self.run, self.dir = run, run.attempt(number)
        self.dir.path.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "atlasrl.trainer", str(run.path), "--attempt", str(number)]
        if resume_from:
            command += ["--resume-from", str(resume_from)]
        self.log = self.dir.path / "train.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(PYLIB), **environment},
                start_new_session=True,
            )

    def wait(self) -> int:
        try:
            return self.process.wait(DEADLINE)
        finally:
            self.kill()

    def kill(self) -> None:
        """kill -9 of the trainer and everything it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def until(self, condition, what: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"no {what} within {DEADLINE} s:\n{self.tail()}"
            time.sleep(0.005)  # a save takes longer; a busy loop would take a core from the run it waits for

    def tail(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-30:])

    def steps(self) -> dict[int, dict]:
        """verl's numbers by step."""
        return {line["step"]: line["data"] for line in read_json_lines(self.dir.metrics)}


COMPARED = ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "actor/entropy")


def numbers(*attempts: Attempt) -> dict[int, tuple]:
    """What a later attempt must repeat bit by bit: norm, loss and score of each step."""
    return {
        step: tuple(data.get(name) for name in COMPARED)
        for attempt in attempts
        for step, data in attempt.steps().items()
    }


def exported_weights(run: RunDir) -> dict:
    """The Hugging Face tensors of the newest checkpoint."""
    from safetensors.torch import load_file

    folder = checkpoints.choose(run).path / "actor" / "huggingface"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {name: load_file(folder / name) for name in set(index.values())}
    return {name: shards[shard][name] for name, shard in index.items()}
