"""The preflight stage of one node: `python -m atlasrl.preflight RUN RANK`.

Everything cheap that can be wrong, a line or more each; all checks run, so that one visit mends everything. Rank 0
looks at the recipe and at the shared files (model, data), every rank at its own machine. An error stops the run, unless
the recipe's `accept` names it.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from atlasrl import doctor, installed, lint, machine
from atlasrl import plan as plans
from atlasrl.doctor import Finding
from atlasrl.errors import Fault
from atlasrl.memory import verdict
from atlasrl.plan import Plan
from atlasrl.rundir import RunDir

if TYPE_CHECKING:
    from ckpt_tools.plan import CastPlan

COLUMNS = {"prompt": "the chat messages", "data_source": "which rule scores it", "reward_model": "its ground_truth"}


Check = Callable[[], "str | Iterable[Finding]"]
"""Returns what it found, or findings; or raises a Fault."""


def checks(plan: Plan, rank: int) -> Iterator[tuple[str, Check]]:
    """Names and checks of a node."""
    if plan.recipe.device == "npu":
        yield "node", lambda: examine_node(plan)
    else:
        yield "versions", lambda: check_versions(plan)
        yield "shared memory", check_shared_memory
    yield "memory", lambda: check_memory(plan)
    yield "device memory", lambda: check_device_memory(plan)
    yield "disk", lambda: check_disk(plan)
    if rank == 0:
        yield "lint", lambda: check_recipe(plan)
        cast = functools.cache(lambda: planned_cast(Path(plan.model_input), Path(plan.model)))  # headers are read once
        yield "model", lambda: check_model(cast())
        if plan.recipe.backend == "megatron":
            yield "saving", lambda: check_saving(cast())
        yield "data", lambda: check_data(Path(plan.train))
        if plan.val:
            yield "validation data", lambda: check_data(Path(plan.val))
        if plan.recipe.data.reward:
            yield "reward", lambda: check_reward(plan.recipe.data.reward)
        if plan.recipe.guard:
            yield "guard", lambda: check_guard(plan)


def examine_node(plan: Plan) -> list[Finding]:
    """What `bin/doctor` says of this node: devices, links, driver, CANN, packages, limits, folders, interface.

    Imports take a minute and are tried where all else is in order.
    """
    wanted = {
        "stack_name": plan.recipe.stack,
        "devices_per_node": plan.devices_per_node,
        "nic": plan.site.nic,
        "paths": (plan.rundir.path, *plan.site.shared),
    }
    found = doctor.findings("npu", **wanted, without=["imports"])
    accepted = plan.recipe.accept
    if not any(each.state == "error" and each.name not in accepted for each in found):
        others = doctor.checks("npu").keys() - {"imports"}
        found += doctor.findings("npu", **wanted, without=others)
    return found


def check_recipe(plan: Plan) -> list[Finding]:
    """The traps that lint knows of, with the variables of this plan."""
    environment = {name: str(value.value) for name, value in plan.environment.items()}
    found = lint.findings(plan.recipe, plan.nodes, plan.devices_per_node, environment=environment)
    states = {"error": "error", "warning": "warn", "accepted": "warn"}
    said = [Finding(each.rule, states[each.level], f"{each.found}; {each.reason}", each.remedy) for each in found]
    return said or [Finding("lint", "ok", f"none of {len(lint.rules())} traps")]


def check_versions(plan: Plan) -> str:
    device = "cpu" if plan.recipe.device == "cpu" else "npu"
    if wrong := installed.differences(device):
        raise Fault(f"{'; '.join(wrong)}; mend with: env/setup.sh {device}")
    return f"{len(installed.pins(device))} packages as pinned"


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


def check_model(planned: CastPlan) -> str:
    """The input checkpoint, by its index and headers alone, as the cast stage will read it."""
    return f"{planned.source}: {len(planned.jobs)} shards to write, {len(planned.dropped)} index keys left out"


def planned_cast(path: Path, target: Path) -> CastPlan:
    """What the cast stage will write."""
    from ckpt_tools import errors
    from ckpt_tools.checkpoint import read_checkpoint
    from ckpt_tools.plan import plan_cast

    try:
        return plan_cast(read_checkpoint(path), target, mtp="drop")
    except errors.Fault as problem:
        raise Fault(str(problem)) from None


def check_saving(planned: CastPlan) -> str:
    """mbridge saves a shard when each key that the index lists for it has come: a stale key costs the whole shard."""
    from ckpt_tools.checkpoint import read_checkpoint
    from ckpt_tools.mbridge import predict_unsaved

    target = planned.target
    indexes = {planned.source: (planned.index, planned.config)}  # of the copy that training starts from
    if (target / "model.safetensors.index.json").exists():
        made = read_checkpoint(target)
        indexes[target] = ({"weight_map": made.index.weight_map}, made.config)
    for folder, (index, config) in indexes.items():
        if losses := predict_unsaved(index["weight_map"], config):
            more = f" and {len(losses) - 1} more shards" if losses[1:] else ""
            raise Fault(
                f"{folder}: no checkpoint would be whole: {losses[0]}{more}; mend it with: bin/ckpt repair {folder}"
            )
    return f"mbridge will save each of {len(planned.index['weight_map'])} tensors"


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


def check_guard(plan: Plan) -> str:
    """The baseline and the rules that the trainer will hold the run against."""
    from atlasrl.curves import guard

    watch = guard.of_recipe(plan.recipe.guard, plan.rundir.path)
    return f"{len(watch.guard.baselines)} baseline seeds, action {plan.recipe.guard.action}"


def carried_out(name: str, check: Check) -> list[Finding]:
    """Run a check; one that breaks is an error and hides no other."""
    try:
        said = check()
    except Fault as fault:
        return [Finding(name, "error", str(fault))]
    except Exception as problem:
        return [Finding(name, "error", f"{type(problem).__name__}: {problem}")]
    return [Finding(name, "ok", said)] if isinstance(said, str) else list(said)


def main(run: str, rank: str) -> int:
    plan = plans.load(RunDir(run))
    accepted, failed, names = set(plan.recipe.accept), [], set()
    for name, check in checks(plan, int(rank)):
        for found in carried_out(name, check):
            names.add(found.name)
            if found.state != "error":
                print(f"{found.state:5} {found}")
            elif found.name in accepted:
                print(f"warn  {found} (accepted by the recipe)")
            else:
                print(f"error: {found}")
                failed.append(found)
    if rank == "0" and (unknown := accepted - names - {rule.id for rule in lint.rules()}):
        print(f"warn  accept: {', '.join(sorted(unknown))} is no rule of lint and nothing that was checked here")
    if len(failed) > 1:  # the last line is what the run's end is told by
        which = ", ".join(dict.fromkeys(found.name for found in failed))
        print(f"error: {len(failed)} findings ({which}), each with its remedy in this log; the first: {failed[0]}")
    elif failed:
        print(f"error: {failed[0]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
