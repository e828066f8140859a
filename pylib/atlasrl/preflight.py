"""The preflight stage of one node: `python -m atlasrl.preflight RUN RANK`.

Everything cheap that can be wrong, each check one line; all of them run, so that one visit mends everything. Rank 0
looks at the shared files (model, data), every rank at its own machine.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from atlasrl import machine, stack
from atlasrl import plan as plans
from atlasrl.errors import Fault
from atlasrl.memory import verdict
from atlasrl.plan import Plan
from atlasrl.rundir import RunDir

COLUMNS = {"prompt": "the chat messages", "data_source": "which rule scores it", "reward_model": "its ground_truth"}


def checks(plan: Plan, rank: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Names and checks; a check returns what it found or raises a Fault."""
    yield "versions", lambda: check_versions(plan)
    yield "memory", lambda: check_memory(plan)
    yield "device memory", lambda: check_device_memory(plan)
    yield "shared memory", check_shared_memory
    yield "disk", lambda: check_disk(plan)
    if rank == 0:
        yield "model", lambda: check_model(Path(plan.model_input), Path(plan.model))
        yield "data", lambda: check_data(Path(plan.train))
        if plan.val:
            yield "validation data", lambda: check_data(Path(plan.val))
        if plan.recipe.data.reward:
            yield "reward", lambda: check_reward(plan.recipe.data.reward)


def check_versions(plan: Plan) -> str:
    device = "cpu" if plan.recipe.device == "cpu" else "npu"
    if wrong := stack.differences(device):
        raise Fault(f"{'; '.join(wrong)}; mend with: env/setup.sh {device}")
    return f"{len(stack.pins(device))} packages as pinned"


def check_memory(plan: Plan) -> str:
    if plan.site.kind == "local":
        return machine.check_memory(Path(plan.model_input), plan.nodes, plan.devices_per_node)
    return f"{psutil.virtual_memory().available / 1e9:.0f} GB available"


def check_device_memory(plan: Plan) -> str:
    """What the memory model predicts for the tightest stage and phase."""
    sentence, fits = verdict.in_one_line(plan.recipe, plan.nodes, plan.devices_per_node)
    if fits is False and not plan.allow_oom_risk:
        raise Fault(f"{sentence}; see bin/memory for remedies, or start with --allow-oom-risk")
    return sentence


def check_shared_memory() -> str:
    """Ray keeps its object store in /dev/shm and falls back to slow files when it is small."""
    free = shutil.disk_usage("/dev/shm").free
    if free < 100 * 2**20:
        raise Fault(
            f"/dev/shm has {free >> 20} MiB free and Ray's object store needs 100; enlarge it or remove leftovers"
        )
    return f"{free / 1e9:.0f} GB free in /dev/shm"


def check_disk(plan: Plan) -> str:
    """Room for the BF16 copy and for the checkpoints that are kept, plus the one being written.

    A checkpoint holds BF16 weights and FP32 master weights with two Adam moments: 14 bytes a parameter.
    """
    parameters = machine.parameters(Path(plan.model_input))
    cast = 0 if any(Path(plan.model).glob("*.safetensors")) else 2 * parameters
    have = sum(1 for _ in plan.rundir.checkpoints.glob("global_step_*"))
    saves = max(plan.recipe.checkpoint.keep + 1 - have, 1) * 14 * parameters
    free = shutil.disk_usage(plan.run).free
    needed = cast + saves + 100 * 2**20
    if needed > free:
        raise Fault(
            f"{plan.run} has {free / 1e9:.1f} GB free and the run needs about {needed / 1e9:.1f} GB (BF16 copy "
            f"{cast / 1e9:.1f}, checkpoints {saves / 1e9:.1f}); free some, lower checkpoint.keep, or use another --runs"
        )
    return f"{free / 1e9:.1f} GB free, about {needed / 1e9:.1f} GB needed"


def check_model(path: Path, target: Path) -> str:
    """The input checkpoint, by its index and headers alone, as the cast stage will read it."""
    from ckpt_tools import errors
    from ckpt_tools.checkpoint import read_checkpoint
    from ckpt_tools.plan import plan_cast

    try:
        planned = plan_cast(read_checkpoint(path), target, mtp="drop")
    except errors.Fault as problem:
        raise Fault(str(problem)) from None
    return f"{path}: {len(planned.jobs)} shards to write, {len(planned.dropped)} index keys left out"


def check_data(path: Path) -> str:
    """The columns that verl reads, without reading rows."""
    import pyarrow.parquet

    if not path.is_file():
        raise Fault(f"{path}: no such file; set data.train (data.val) in the recipe")
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except Exception as problem:
        raise Fault(f"{path} is no parquet file: {problem}; it may be truncated or a git-lfs pointer") from None
    missing = [f"{name} ({what})" for name, what in COLUMNS.items() if name not in table.schema_arrow.names]
    if missing:
        found = ", ".join(table.schema_arrow.names)
        raise Fault(f"{path} lacks the column {', '.join(missing)}; it has {found}; write it in verl's schema")
    if table.metadata.num_rows == 0:
        raise Fault(f"{path} has no rows")
    return f"{path}: {table.metadata.num_rows} prompts"


def check_reward(path: Path) -> str:
    """The reward file compiles and defines compute_score; it is not run here."""
    import ast

    try:
        tree = ast.parse(path.read_text())
    except OSError as problem:
        raise Fault(f"{path}: {problem.strerror}; set data.reward in the recipe") from None
    except SyntaxError as problem:
        raise Fault(f"{path}:{problem.lineno}: {problem.msg}") from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == "compute_score" for node in tree.body):
        raise Fault(f"{path} defines no compute_score(data_source, solution_str, ground_truth, extra_info)")
    return str(path)


def main(run: str, rank: str) -> int:
    plan = plans.load(RunDir(run))
    failed = []
    for name, check in checks(plan, int(rank)):
        try:
            print(f"ok    {name}: {check()}")
        except Fault as fault:
            print(f"error: {name}: {fault}")
            failed.append(name)
        except Exception as problem:  # a check that breaks must not hide the others
            print(f"error: {name}: {type(problem).__name__}: {problem}")
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
