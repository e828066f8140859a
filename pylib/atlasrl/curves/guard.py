"""Judge a run while it trains: the guard in the job, and `bin/compare --follow`."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from atlasrl.curves import store
from atlasrl.curves.aliases import Metric
from atlasrl.curves.align import BY_STEP, Alignment
from atlasrl.curves.curve import Run
from atlasrl.curves.judge import Finding, Verdict, judge
from atlasrl.curves.load import RunReader
from atlasrl.curves.rules import Rules
from atlasrl.curves.rules import load as load_rules
from atlasrl.errors import UsageFault

HOOK_SECONDS = 60


@dataclass(frozen=True)
class Failure:
    """A check that fails now, and whether it did not at the last look."""

    metric: str
    finding: Finding
    new: bool

    def sentence(self) -> str:
        """What failed, since when, against which limit; one line."""
        f = self.finding
        since = f" since step {f.first_step}" if f.first_step is not None else ""
        return f"{self.metric} fails {f.check}{since}: {f.value:.4g}, limit {f.limit}" + (
            f" ({f.text})" if f.text else ""
        )


@dataclass
class Guard:
    """Rules and baseline seeds that a growing run is held against; without seeds, the checks that need none.

    Nothing is judged in the first `least_steps` steps: early curves are noise.
    """

    rules: Rules
    baselines: list[Run]
    how: Alignment = BY_STEP
    metrics: dict[str, Metric] | None = None
    least_steps: int = 20
    verdict: Verdict | None = field(default=None, init=False)
    _failing: set[tuple[str, str]] = field(default_factory=set, init=False)

    def check(self, run: Run) -> list[Failure]:
        """Judge the run as it is now. Returns every check that fails; `new` marks those that started to.

        Raises:
            UsageFault: the run and the baseline have no metric in common.
        """
        if run.last_step() < self.least_steps:
            return []
        self.verdict = judge([run], self.baselines, self.rules, self.how, self.metrics)
        failures = [
            Failure(metric.metric, finding, (metric.metric, finding.check) not in self._failing)
            for metric, finding in self.verdict.failures()
        ]
        self._failing = {(failure.metric, failure.finding.check) for failure in failures}
        return failures


def of_recipe(section, run: Path) -> Watch:
    """The watch that a recipe's `guard` section asks for, over the run directory `run`.

    Call `update()` after each step; `section.action` says what the caller does about new failures.

    Raises:
        UsageFault: no such baseline or rules file.
    """
    baselines = store.load_seeds(str(section.baseline)) if section.baseline else []
    chosen = load_rules(Path(section.rules)) if section.rules else load_rules()
    return Watch(RunReader(str(run)), Guard(chosen, baselines, least_steps=section.after_steps))


@dataclass
class Watch:
    """A guard over a run on disk: reads what was added, judges it, calls the hook when a check starts to fail."""

    reader: RunReader
    guard: Guard
    hook: str | None = None

    def update(self) -> list[Failure] | None:
        """None when nothing was added; else every failing check, after the hook was told of the new ones.

        Raises:
            Fault: what `RunReader.update` and `Guard.check` raise.
        """
        if not self.reader.update():
            return None
        failures = self.guard.check(self.reader.run())
        if self.hook and any(failure.new for failure in failures):
            self.tell([failure for failure in failures if failure.new])
        return failures

    def tell(self, failures: list[Failure]) -> None:
        """Run the hook in a shell: sentences in ATLASRL_FAILURES, the verdict as JSON on its standard input.

        Raises:
            UsageFault: the hook fails or takes longer than a minute. A watch that cannot warn is no watch.
        """
        run = self.reader.run()
        environment = {
            **os.environ,
            "ATLASRL_RUN": run.name,
            "ATLASRL_STEP": str(run.last_step()),
            "ATLASRL_FAILURES": "\n".join(failure.sentence() for failure in failures),
        }
        verdict = json.dumps(self.guard.verdict.as_dict())
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", self.hook],
                env=environment,
                input=verdict,
                text=True,
                timeout=HOOK_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UsageFault(f"the hook took longer than {HOOK_SECONDS} s: {self.hook}") from None
        if done.returncode:
            raise UsageFault(f"the hook exited with {done.returncode}: {self.hook}")
