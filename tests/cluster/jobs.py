"""Start runs on the test cluster the way a person does, and watch them from the outside."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from cluster import Cluster

from atlasrl.rundir import RunDir, read_json_lines

ROOT = Path(__file__).resolve().parents[2]
LIGHT = Path(__file__).parent / "light_python"


@dataclass
class Job:
    """A run on the cluster."""

    cluster: Cluster
    id: str
    run: RunDir

    def events(self, *kinds: str) -> list[dict]:
        return [event for event in self.run.events() if not kinds or event["event"] in kinds]

    def decisions(self) -> list[tuple[str, str]]:
        """(kind, action) of every ended attempt."""
        return [(event["kind"], event["action"]) for event in self.events("decided")]

    def steps(self) -> list[int]:
        """Every training step that was done, in order, repeats included."""
        return [line["step"] for attempt in self.run.attempts() for line in read_json_lines(attempt.metrics)]

    def story(self) -> str:
        """The journal and the logs' tails, for a failing test's message."""
        told = [json.dumps(event)[:400] for event in self.run.events() if event["event"] != "ports"]
        for log in sorted((self.run.path / "slurm").glob("*.out")):
            told += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(told)

    def wait(self, condition, seconds: float, what: str):
        try:
            return self.cluster.wait_for(condition, seconds, what)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.story()}") from None

    def wait_for_step(self, step: int, seconds: float = 600) -> None:
        self.wait(lambda: max(self.steps(), default=0) >= step, seconds, f"step {step}")

    def wait_for_checkpoint(self, step: int, seconds: float = 600) -> None:
        self.wait(lambda: any(e["step"] >= step for e in self.events("checkpoint")), seconds, f"checkpoint {step}")

    def wait_for_decision(self, number: int, seconds: float = 600) -> dict:
        """The decision after the number-th attempt (from 1)."""
        return self.wait(lambda: self.events("decided")[number - 1 : number], seconds, f"the end of attempt {number}")[
            0
        ]

    def wait_for_requeue(self, attempt: int, seconds: float = 600) -> None:
        """Wait until the job runs again, as that attempt; Slurm's two minutes of delay are cut short.

        Not to nothing: a node refuses a job whose credential it has just revoked ("Job credential revoked").
        """
        released = time.monotonic() + 5

        def back() -> bool:
            if time.monotonic() > released and self.cluster.job_state(self.id) == "PENDING":
                self.cluster.release(self.id)
            return any(event["attempt"] == attempt for event in self.events("allocated"))

        self.wait(back, seconds, f"job {self.id} to run again as attempt {attempt}")

    def wait_for_end(self, seconds: float = 600) -> dict:
        """Wait until nothing follows any more; returns the last decision."""

        def ended():
            decided = self.events("decided")
            return decided and decided[-1]["action"] in ("done", "stop") and decided[-1]

        return self.wait(ended, seconds, "the end of the run")


def train(
    cluster: Cluster,
    name: str,
    *,
    nodes: int = 2,
    site: dict | None = None,
    runs: Path | None = None,
    **recipe,
) -> Job:
    """Submit a run with the light trainer.

    Args:
        site: changes to the cluster's site file, section by section.
        runs: where the run is made; default: the cluster's shared folder.
        recipe: changes to the small recipe; dotted keys with `__` for the dot.
    """
    file = cluster.shared / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe_tree(cluster, nodes=nodes, **recipe)))
    where = ["--runs", str(runs)] if runs else []
    return submit(cluster, str(file), name, nodes, site_file(cluster, name, True, site or {}), *where)


def submit(cluster: Cluster, recipe: str, name: str, nodes: int, site: Path, *options: str) -> Job:
    """Submit a recipe, by name or file, with bin/train on the login machine."""
    words = [recipe, "--site", str(site), "--nodes", str(nodes), "--name", name, "--json", *options]
    told = json.loads(command(cluster, "train", *words).stdout)
    return Job(cluster, told["job"], RunDir(told["run"]))


def recipe_tree(cluster: Cluster, **changes) -> dict:
    """The small recipe of the trainer's own tests."""
    sys.path.insert(0, str(ROOT / "tests" / "trainer"))
    import trainer_assets as assets

    folder = cluster.shared / "assets"
    names = ("model", "train.parquet", "val.parquet", "reward.py")
    made = {n: folder / n for n in names} if folder.exists() else assets.make_assets(folder, prompts=64)
    return assets.recipe_tree(made, **{"dapo__train_batch_size": 8, "dapo__mini_batch_size": 8} | changes)


def site_file(cluster: Cluster, name: str, light: bool, changes: dict) -> Path:
    tree = yaml.safe_load(cluster.site.read_text())
    if light:
        tree["python"] = str(LIGHT)
    for section, values in changes.items():
        if values is None:
            del tree[section]
            continue
        tree[section] = tree.get(section, {}) | values if isinstance(values, dict) else values
    file = cluster.shared / f"site-{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def command(cluster: Cluster, verb: str, *words: str, **options):
    """Run bin/<verb> on the login machine."""
    return cluster.login(str(ROOT / "bin" / verb), *words, ATLASRL_REAL_PYTHON=sys.executable, **options)
