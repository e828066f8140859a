"""The same answers through two reward rules, each in a process of its own; where they disagree (axis 6)."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atlasrl.errors import Fault, UsageFault
from atlasrl.precision.answers import Answer

CHILD = Path(__file__).with_name("score_child.py")
START_SECONDS = 180  # importing verl for its own rules costs about 10 s, on a busy machine a minute
VERL = ("verl.utils.reward_score", "default_compute_score")
SAME = 1e-6


@dataclass(frozen=True)
class Rule:
    """A reward rule: a Python file or a module, its function, and the interpreter that has its packages."""

    source: str
    function: str
    python: str = sys.executable

    @classmethod
    def parse(cls, text: str, python: str | None = None) -> Rule:
        """`FILE.py`, `FILE.py:function`, or `verl` for verl's own rules.

        Raises:
            UsageFault: no such file.
        """
        python = python or sys.executable
        if text == "verl":
            return cls(*VERL, python)
        source, _, function = text.partition(":")
        if not Path(source).is_file():
            raise UsageFault(f"reward rule {source} is no file; give FILE.py, FILE.py:function, or verl")
        return cls(str(Path(source).absolute()), function or "compute_score", python)


@dataclass(frozen=True)
class Disagreement:
    """One answer with what each rule says of it: {"score": …} or {"error": …}."""

    answer: Answer
    left: dict
    right: dict

    @property
    def size(self) -> float:
        """How far the scores are apart; an error on one side counts as infinitely far."""
        try:
            return abs(float(self.left["score"]) - float(self.right["score"]))
        except (KeyError, TypeError, ValueError):
            return float("inf")


def compare(answers: list[Answer], left: Rule, right: Rule, seconds: float = 10.0) -> list[Disagreement]:
    """Every answer on which the rules differ, the largest difference first.

    Args:
        seconds: the longest a rule may take for one answer; what hangs or crashes is a result, not an end.

    Raises:
        Fault: a rule cannot be loaded.
    """
    both = zip(answers, score(left, answers, seconds), score(right, answers, seconds), strict=True)
    found = [Disagreement(*each) for each in both]
    return sorted((each for each in found if not _agree(each.left, each.right)), key=lambda each: -each.size)


def _agree(left: dict, right: dict) -> bool:
    if "error" in left or "error" in right:
        return "error" in left and "error" in right
    try:
        return abs(float(left["score"]) - float(right["score"])) <= SAME
    except (TypeError, ValueError):
        return left["score"] == right["score"]


def score(rule: Rule, answers: list[Answer], seconds: float = 10.0) -> list[dict]:
    """What a rule says of each answer.

    Raises:
        Fault: the rule cannot be loaded; the last line of its traceback is passed on.
    """
    results: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="atlasrl-scoring-") as folder:
        lines = Path(folder) / "answers.jsonl"
        lines.write_text("".join(answer.to_json() + "\n" for answer in answers))
        while len(results) < len(answers):
            results += _scores(rule, lines, len(results), len(answers), seconds)
    return results


def _scores(rule: Rule, lines: Path, first: int, total: int, seconds: float) -> list[dict]:
    """Results from `first` on, up to the end or to an answer that hangs or crashes the rule, which is one too."""
    command = [rule.python, str(CHILD), rule.source, rule.function, str(lines), str(first)]
    errors = lines.with_name("errors.log")
    with errors.open("wb") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as child:
        try:
            reader = _Lines(child.stdout)
            if reader.next(START_SECONDS) != "ready":
                child.kill()
                child.wait()
                last = (errors.read_text(errors="replace").strip().splitlines() or ["it says nothing"])[-1]
                raise Fault(f"{rule.source} cannot be loaded: {last[:300]}; give --python of the environment it needs")
            results: list[dict] = []
            while first + len(results) < total:
                line = reader.next(seconds)
                if line is None:
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(seconds if reader.ended else 0)
                    ended = child.returncode
                    child.kill()
                    child.wait()
                    why = f"no score after {seconds:g} s" if ended is None else f"the process ended with {ended}"
                    return [*results, {"error": why}]
                results.append(json.loads(line))
            return results
        finally:
            child.kill()


class _Lines:
    """Lines of a pipe, each with a deadline."""

    def __init__(self, pipe):
        self.descriptor, self.rest, self.ended = pipe.fileno(), b"", False
        self.selector = selectors.DefaultSelector()
        self.selector.register(pipe, selectors.EVENT_READ)

    def next(self, seconds: float) -> str | None:
        """The next line; None at the end of the pipe, or when none came in time."""
        while b"\n" not in self.rest:
            if not self.selector.select(seconds):
                return None
            block = os.read(self.descriptor, 1 << 16)
            if not block:
                self.ended = True
                return None
            self.rest += block
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode()


def text(total: int, found: list[Disagreement], names: tuple[str, str], limit: int = 10) -> str:
    """The disagreements for a person."""
    lines = [f"{names[0]} and {names[1]}: {total} answers, {len(found)} disagreements"]
    finite = [each for each in found if each.size != float("inf")]
    if finite:
        shift = sum(float(each.right["score"]) - float(each.left["score"]) for each in finite) / total
        lines.append(f"mean reward differs by {shift:+.4g} (right minus left) over all answers")
    for each in found[:limit]:
        lines.append(f"  {each.answer.where}: {_said(each.left)} | {_said(each.right)}")
        lines.append(
            f"      answer …{each.answer.solution_str[-60:]!r}, right answer {str(each.answer.ground_truth)[:40]!r}"
        )
    if len(found) > limit:
        lines.append(f"  and {len(found) - limit} more; --limit or --json shows them")
    return "\n".join(lines)


def _said(result: dict) -> str:
    return f"error: {result['error'][:60]}" if "error" in result else f"{result['score']}"


def as_json(total: int, found: list[Disagreement]) -> dict:
    """The disagreements as data."""
    listed = [
        {"where": d.answer.where, "solution_str": d.answer.solution_str, "left": d.left, "right": d.right}
        for d in found
    ]
    return {"answers": total, "disagreements": listed}
