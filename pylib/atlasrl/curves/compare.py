"""What bin/compare does: load, judge, report; once, or again at every step of a live run."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from rich.console import Console
from rich.text import Text

from atlasrl.curves import aliases, guard, load, overlay, page, picture, report, rules, store
from atlasrl.curves.align import Alignment
from atlasrl.curves.curve import Run
from atlasrl.curves.judge import Verdict, judge
from atlasrl.errors import Fault, UsageFault
from atlasrl.rundir import RunDir, write_atomically

POLL_SECONDS = 0.5


def run_command(run: tuple[str, ...], baseline: tuple[str, ...], **options) -> int:
    """Serve one call of bin/compare; returns the exit code. Unreadable input is a usage error: it proves nothing.

    Raises:
        UsageFault: what cannot be read or compared.
    """
    try:
        if options["follow"]:
            return _follow(run, baseline, options)
        return _once(run, baseline, options)
    except UsageFault:
        raise
    except Fault as fault:
        raise UsageFault(str(fault)) from fault


def baseline_runs(names: tuple[str, ...], allow_truncated: bool = False) -> list[Run]:
    """The seeds of stored baselines and of runs given by path.

    Raises:
        UsageFault: neither a baseline nor a run.
    """
    runs: list[Run] = []
    for name in names:
        if store.find(name):
            runs += store.load_seeds(name)
        elif _is_source(name):
            runs.append(load.load(name, allow_truncated))
        else:
            runs += store.load_seeds(name)
    return runs


def _is_source(spec: str) -> bool:
    try:
        return bool(load.parse(spec)[1])
    except UsageFault:
        return False


def _once(run: tuple[str, ...], baseline: tuple[str, ...], options: dict) -> int:
    candidates = [load.load(spec, options["allow_truncated"]) for spec in run]
    baselines = baseline_runs(baseline, options["allow_truncated"])
    metrics, chosen = aliases.with_changes(list(options["changes"])), _rules(options)
    verdict = judge(candidates, baselines, chosen, _alignment(options), metrics)
    if not verdict.judged:
        reasons = dict.fromkeys(m.reason for m in verdict.metrics if m.reason)
        raise UsageFault(f"nothing could be judged: {'; '.join(reasons)}")
    if options["as_json"]:
        print(json.dumps(verdict.as_dict(), indent=1))
    else:
        report.text(verdict, Console(width=report.WIDTH, highlight=False), options["details"])
    written = report.data(verdict, candidates, baselines, chosen, metrics, options["axis"])
    _write(options, written, verdict, candidates, baselines, metrics)
    return 0 if verdict.aligned else 1


def _write(
    options: dict, written: dict, verdict: Verdict, candidates: list[Run], baselines: list[Run], metrics
) -> None:
    if options["html"]:
        write_atomically(Path(options["html"]), page.html(written))
    if options["png"]:
        picture.png(written, Path(options["png"]))
    if options["tensorboard"]:
        shown = {metric.metric: metrics[metric.metric] for metric in verdict.metrics}
        overlay.write(Path(options["tensorboard"]), candidates, baselines, shown)


def _follow(run: tuple[str, ...], baseline: tuple[str, ...], options: dict) -> int:
    if len(run) != 1:
        raise UsageFault("--follow watches one run; start one watch per run")
    reader = load.RunReader(run[0], options["allow_truncated"])
    rule, how = _rules(options), _alignment(options)
    metrics = aliases.with_changes(list(options["changes"]))
    watch = guard.Watch(reader, guard.Guard(rule, baseline_runs(baseline), how, metrics), options["hook"])
    console = Console(width=report.WIDTH, highlight=False)
    failures: list[guard.Failure] = []
    pause = threading.Event()  # never set: its wait is a poll that Ctrl-C interrupts
    try:
        while True:
            ended = _ended(reader)
            found = watch.update()
            if found is not None:
                failures = found
                _print_step(console, reader.run(), failures)
            if ended or (options["until_step"] is not None and reader.run().last_step() >= options["until_step"]):
                return 1 if failures else 0
            pause.wait(POLL_SECONDS)
    except KeyboardInterrupt:
        return 1 if failures else 0


def _print_step(console: Console, run: Run, failures: list[guard.Failure]) -> None:
    state = f"{len(failures)} checks fail" if failures else "aligned so far"
    console.print(Text(f"step {run.last_step()}: {state}", "red" if failures else "green"))
    for failure in failures:
        if failure.new:
            console.print(Text(f"  {failure.sentence()}", "bold red"))


def _ended(reader: load.RunReader) -> bool:
    """Whether the run directory's last attempt wrote its outcome; other sources end with Ctrl-C or --until-step."""
    attempts = RunDir(reader.paths[0]).attempts()
    return bool(attempts) and attempts[-1].outcome.exists()


def _rules(options: dict) -> rules.Rules:
    return rules.load(Path(options["rules"])) if options["rules"] else rules.load()


def _alignment(options: dict) -> Alignment:
    first = last = None
    if options["steps"]:
        begin, separator, end = options["steps"].partition(":")
        try:
            first, last = (int(part) if part else None for part in (begin, end))
        except ValueError:
            separator = ""
        if not separator:
            raise UsageFault(f"--steps {options['steps']!r} is not FIRST:LAST, for example 10:200 or 50:")
    return Alignment(options["axis"], first, last, options["stride"], options["offset"])
