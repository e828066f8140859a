"""Install a stack into this interpreter: `python -m atlasrl.install STACK [--wheels DIR]`, called by env/setup.sh.

Step by step in the stack's order. A finished step leaves a stamp and is skipped the next time, unless it or a step
before it has changed; a broken one is named, with pip's last lines, and continued. Everything is kept in setup.log.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from atlasrl import stacks
from atlasrl.errors import Fault, UsageFault
from atlasrl.stacks import Stack, Step

TAIL = 5


@dataclass(frozen=True)
class Work:
    """One step as it will be done. Commands run one after the other."""

    name: str
    commands: list[list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    note: str = ""


def works(stack: Stack, folder: Path, python: str, wheels: Path | None = None) -> Iterator[Work]:
    """The steps of a stack, in order. Pure.

    Args:
        python: the interpreter of the environment.
        folder: of the environment; holds constraints, clones, stamps and the log.
        wheels: install from this folder alone. A requirements file of a clone lies there as <package>-<file>.
    """
    limits = ["-c", str(folder / "stack-constraints.txt")]
    for step in stack.install:
        commands = [["bash", "-c", step.check]] if step.check else []
        commands += _requirements(stack, step, folder, python, wheels, limits)
        for verb, *words in stack.commands(step, wheels):
            options = [] if verb == "uninstall" else ["--no-compile", "--no-input", *limits]
            commands.append([python, "-m", "pip", verb, *options, *words])
        yield Work(step.name, commands, dict(step.environment), step.note)


def _requirements(
    stack: Stack, step: Step, folder: Path, python: str, wheels: Path | None, limits: list[str]
) -> list[list[str]]:
    if not step.requirements:
        return []
    pip = [python, "-m", "pip", "install", "--no-compile", "--no-input", *limits]
    (package,) = step.packages
    if wheels:
        return [[*pip, "--no-index", "--find-links", str(wheels), "-r", str(wheels / f"{package}-{step.requirements}")]]
    url, commit = stack.clone_of(step)
    clone = folder / "src" / f"{package}-{commit}"
    fetch = (
        'test -e "$1" || { rm -rf "$1.part" && git clone --quiet --no-checkout "$2" "$1.part" && mv "$1.part" "$1"; } '
        '&& git -C "$1" checkout --quiet "$3"'
    )
    return [["bash", "-c", fetch, "clone", str(clone), url, commit], [*pip, "-r", str(clone / step.requirements)]]


def constraints(stack: Stack) -> str:
    """What no step may change: the releases of the stack. A package from git is named by its commit alone."""
    return "".join(f"{name}=={found.version}\n" for name, found in stack.packages.items() if not found.git)


def install(stack: Stack, folder: Path, python: str = sys.executable, wheels: Path | None = None) -> None:
    """Do what is not done yet.

    Raises:
        Fault: a step failed; the next call continues there.
    """
    folder.joinpath("stack-constraints.txt").write_text(constraints(stack))
    log, key = folder / "setup.log", constraints(stack)
    planned = list(works(stack, folder, python, wheels))
    for number, work in enumerate(planned, 1):
        key = hashlib.sha256((key + json.dumps(asdict(work))).encode()).hexdigest()[:16]
        stamp = folder / f".stack-{number}"
        if stamp.is_file() and stamp.read_text() == key:
            continue
        stamp.unlink(missing_ok=True)
        print(f"[{number}/{len(planned)}] {work.name}", flush=True)
        started = time.monotonic()
        for command in work.commands:
            _run(command, work, number, log)
        stamp.write_text(key)
        print(f"      done in {time.monotonic() - started:.0f} s", flush=True)


def _run(command: list[str], work: Work, number: int, log: Path) -> None:
    with log.open("ab") as file:
        file.write(f"$ {' '.join(command)}\n".encode())
        file.flush()
        environment = {**os.environ, **work.environment}
        try:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False
            )
        except OSError as problem:
            raise Fault(f"step {number} ({work.name}): {command[0]}: {problem.strerror}") from None
    if done.returncode:
        last = [line for line in log.read_text(errors="replace").splitlines()[-TAIL:] if not line.startswith("$ ")]
        why = f": {' | '.join(last)}" if last else ""
        note = f" ({work.note})" if work.note else ""
        raise Fault(
            f"step {number} ({work.name}) failed at `… {' '.join(command)[-100:]}`{why}{note}; mend it and run the "
            f"same command again, it continues here; all of it is in {log}"
        )


def differences(stack: Stack) -> list[str]:
    """One line per package that is not there or of another version."""
    found = {}
    for name in stack.packages:
        try:
            found[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            found[name] = "nothing"
    return [
        f"{name}: {package.version} expected, {found[name]} installed"
        for name, package in stack.packages.items()
        if found[name] != package.version
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m atlasrl.install", description="Install a stack.")
    parser.add_argument("stack", help="a name in env/stacks, or a YAML file")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="from this folder of wheels alone")
    options = parser.parse_args(arguments)
    try:
        stack = stacks.load(options.stack)
        if options.wheels and not options.wheels.is_dir():
            raise UsageFault(f"--wheels {options.wheels}: no such folder")
        install(stack, Path(sys.prefix), wheels=options.wheels and options.wheels.absolute())
        if wrong := differences(stack):
            raise Fault(f"installed, but not as {options.stack} says: {'; '.join(wrong)}; a later step replaced it")
    except Fault as fault:
        print(f"error: {fault}", file=sys.stderr)
        return fault.exit_code
    print(f"stack {options.stack}: {len(stack.packages)} packages as pinned")
    return 0


if __name__ == "__main__":
    sys.exit(main())
