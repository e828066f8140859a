"""The guard in the job: judges the run after each step and says when the recipe wants it ended. See docs/compare.md"""

from __future__ import annotations

from atlasrl.curves import guard
from atlasrl.errors import Fault
from atlasrl.recipe import Guard
from atlasrl.rundir import AttemptDir


class Watchman:
    """Holds the curves of a run against the recipe's `guard`; every new failure is printed and journalled.

    What failed before this attempt is told and does not end it: somebody resumed the run knowing that.

    Raises:
        Fault: no such baseline or rules file, or one that was changed.
    """

    def __init__(self, section: Guard, attempt: AttemptDir):
        self.section, self.attempt = section, attempt
        self.watch: guard.Watch | None = guard.of_recipe(section, attempt.run.path)
        self.look(0, ends=False)

    def look(self, step: int, *, ends: bool = True) -> str | None:
        """Judge what was logged up to `step`; why the run must end, or None.

        A guard that can judge no longer says so once. It does not end a run: that is no proof of a fault in the curve.
        """
        if self.watch is None:
            return None
        try:
            failures = self.watch.update() or []
        except Fault as problem:
            self.watch = None
            self._tell(step, "off", f"the guard judges no longer: {problem}")
            return None
        new = [failure.sentence() for failure in failures if failure.new]
        if not new:
            return None
        action = self.section.action if ends else "warn"
        self._tell(step, action, f"guard: {'; '.join(new)}")
        return "; ".join(new) if action == "stop" else None

    def _tell(self, step: int, action: str, message: str) -> None:
        print(f"warning: step {step}: {message}", flush=True)
        self.attempt.run.record(
            "guard", attempt=self.attempt.number, step=step, action=action, message=" ".join(message.split())
        )
