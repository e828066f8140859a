"""The plan: recipe + site + flags, fully resolved. Pure; every derived value carries its reason.

`bin/train --dry-run` prints it, `rundir` keeps it as plan.json, and the nodes of a job do what it says.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from atlasrl import determinism, raycluster, stacks
from atlasrl import recipe as recipes
from atlasrl import site as sites
from atlasrl.errors import Fault, UsageFault
from atlasrl.launch import ports
from atlasrl.launch.addresses import INTERFACES
from atlasrl.recipe import Recipe
from atlasrl.rundir import RunDir
from atlasrl.site import Site
from atlasrl.trainer import fixes, layout
from atlasrl.trainer.dialects import translated
from atlasrl.trainer.override import Override
from atlasrl.trainer.overrides import verl_overrides

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("inputs", "preflight", "cast", "train", "export")
RAY_TEMP_LIMIT = 41  # bytes: AF_UNIX paths end at 107, Ray appends up to 66 (session, sockets/plasma_store)
EXPORT = re.compile(r"export (\w+)=(\S*)\s+# (.+)")


@dataclass(frozen=True)
class Value:
    """A derived value and why it is so."""

    value: str | int | float
    reason: str


@dataclass(frozen=True)
class Plan:
    """Everything the nodes of a job need to know. Written to plan.json, read by node.main."""

    run: str
    recipe: Recipe
    site: Site
    nodes: int
    devices_per_node: int
    model: str
    train: str
    val: str | None
    python: str
    environment: dict[str, Value]
    overrides: list[Override]
    allow_oom_risk: bool = False
    notes: dict[str, Value] = field(default_factory=dict)

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.run)

    @property
    def model_input(self) -> str:
        """The checkpoint the cast stage reads."""
        return str(self.recipe.model.path or self.rundir.input / "model")

    def to_json(self) -> str:
        tree = asdict(self) | {
            "recipe": self.recipe.model_dump(mode="json"),
            "site": self.site.model_dump(mode="json"),
            "environment": {name: str(value.value) for name, value in self.environment.items()},
            "reasons": {name: value.reason for name, value in self.environment.items()},
        }
        return json.dumps(tree, indent=1) + "\n"

    def ray_temp(self, attempt: int, rank: int) -> Path:
        """A short folder on the node's own disk, new for each attempt, one for each node.

        On a shared disk a node finds another node's session and sockets (verl issue 158).

        Raises:
            UsageFault: the scratch folder's path is too long for Ray's sockets.
        """
        name = hashlib.sha256(f"{self.run}:{attempt}".encode()).hexdigest()[:8]
        folder = self.site.scratch / f"atlasrl-{name}" / str(rank)
        if len(str(folder).encode()) > RAY_TEMP_LIMIT:
            raise UsageFault(
                f"Ray's temporary folder {folder} is longer than {RAY_TEMP_LIMIT} bytes, so its sockets would exceed "
                "the limit of 107 bytes; set a shorter `scratch` in the site file"
            )
        return folder


def make(
    recipe: Recipe,
    site: Site,
    run: RunDir,
    *,
    nodes: int | None = None,
    devices_per_node: int | None = None,
    allow_oom_risk: bool = False,
) -> Plan:
    """Resolve a recipe for a site.

    Raises:
        UsageFault: the request cannot be served, whatever the machine: no nodes, a split that does not fit.
    """
    notes = {}
    asked = "asked for on the command line"
    named = "the recipe's `nodes`" if nodes is None else asked
    nodes = recipe.nodes if nodes is None else nodes
    notes["nodes"] = Value(nodes, named)
    if nodes < 1:
        raise UsageFault(f"{nodes} nodes cannot hold a job; ask for at least 1")
    devices = devices_per_node or recipe.devices_per_node
    notes["devices_per_node"] = Value(devices, asked if devices_per_node else "the recipe's `devices_per_node`")
    _check_split(recipe, nodes * devices)

    from atlasrl.memory import verdict  # a plan that is read from a run needs no memory model

    sentence, _ = verdict.in_one_line(recipe, nodes, devices)
    notes["device memory"] = Value(sentence, "predicted by atlasrl.memory; bin/memory shows each term")
    train = str(recipe.data.train or run.input / "train.parquet")
    val = recipe.data.val or (run.input / "val.parquet" if recipe.inputs else None)
    model = str(recipe.model.cast_path or run.model)
    notes["model"] = Value(model, "BF16 copy made by the cast stage; the input is never changed")
    stack = stacks.of_recipe(recipe)
    if stack:
        line = stack.capabilities.config_keys
        named = "the recipe's `stack`" if recipe.stack else f"the default of device {recipe.device}"
        notes["stack"] = Value(recipe.stack or stacks.DEFAULT[recipe.device], f"{named}; settings are those of {line}")
    overrides = verl_overrides(
        recipe,
        nodes=nodes,
        devices_per_node=devices,
        model=model,
        train=train,
        val=str(val) if val else None,
        run=run,
    )
    return Plan(
        run=str(run.path),
        recipe=recipe,
        site=site,
        nodes=nodes,
        devices_per_node=devices,
        model=model,
        train=train,
        val=str(val) if val else None,
        python=str(site.python or sys.executable),
        environment=_environment(recipe, site, run),
        overrides=translated(overrides, recipe, stack),
        allow_oom_risk=allow_oom_risk,
        notes=notes,
    )


def load(run: RunDir) -> Plan:
    """Read plan.json of a run.

    Raises:
        Fault: no plan, or one that this version cannot read.
    """
    try:
        tree = json.loads(run.plan.read_text())
        reasons = tree.pop("reasons")
        return Plan(
            **tree
            | {
                "recipe": recipes.parse(tree["recipe"], str(run.plan)),
                "site": sites.parse(tree["site"], str(run.plan)),
                "environment": {name: Value(value, reasons[name]) for name, value in tree["environment"].items()},
                "overrides": [Override(**override) for override in tree["overrides"]],
                "notes": {name: Value(**value) for name, value in tree["notes"].items()},
            }
        )
    except FileNotFoundError:
        raise Fault(f"{run.path} is no run: it has no plan.json; `bin/status` lists the runs") from None
    except (ValueError, TypeError, KeyError) as problem:
        raise Fault(f"{run.plan} cannot be read ({problem}); it was edited or written by another version") from None


def _check_split(recipe: Recipe, devices: int) -> None:
    split = recipe.parallel
    model_parallel = split.tensor * split.pipeline * split.context
    if recipe.backend == "fsdp2" and model_parallel * split.expert > 1:
        raise UsageFault("backend fsdp2 knows no tensor, pipeline, context or expert split; set `backend: megatron`")
    if devices % model_parallel:
        raise UsageFault(
            f"tensor {split.tensor} × pipeline {split.pipeline} × context {split.context} = {model_parallel} does not "
            f"divide {devices} devices; change --nodes or the recipe's `parallel`"
        )
    expert_parallel = split.expert * split.expert_tensor * split.pipeline
    if recipe.backend == "megatron" and devices % expert_parallel:
        raise UsageFault(
            f"expert {split.expert} × expert_tensor {split.expert_tensor} × pipeline {split.pipeline} = "
            f"{expert_parallel} does not divide {devices} devices; change --nodes or the recipe's `parallel`"
        )
    if recipe.backend == "megatron" and recipe.device == "cpu":
        layout.require_proven(layout.of_recipe(recipe, devices))


def _environment(recipe: Recipe, site: Site, run: RunDir) -> dict[str, Value]:
    """The variables of every process of the job, on every node the same."""
    device = "cpu" if recipe.device == "cpu" else "npu" if recipe.device == "npu" else "cuda"
    file = ROOT / "env" / f"{device}.env.sh"
    environment = {
        name: Value(shlex.split(value)[0] if value else "", reason)
        for name, value, reason in EXPORT.findall(file.read_text() if file.exists() else "")
    }
    environment["PYTHONPATH"] = Value(f"{ROOT / 'pylib'}:{ROOT}", "this clone's code on every node")
    environment["RAY_AUTH_MODE"] = Value("token", "a cluster of ours takes only our own clients")
    environment["RAY_AUTH_TOKEN_PATH"] = Value(str(run.path / "ray.token"), "one token per run, readable by its owner")
    if not site.shares_host:
        environment.pop("GLOO_SOCKET_IFNAME", None)  # loopback, for nodes that share this machine
    if site.nic:
        reason = "the site's `nic`: one interface for all"
        environment |= {name: Value(site.nic, reason) for name in INTERFACES}
    if recipe.deterministic:
        mode = (recipe.environment | site.environment).get("HCCL_OP_EXPANSION_MODE")
        for name, (value, reason) in determinism.environment(recipe.device, mode).items():
            environment[name] = Value(value, f"deterministic: {reason}")
    for origin, extra in (("recipe", recipe.environment), ("site", site.environment)):
        environment |= {name: Value(value, f"the {origin}'s `environment`") for name, value in extra.items()}
    return environment


def show(plan: Plan) -> str:
    """The plan as text for a person."""
    lines = [f"run          {plan.run}"]
    lines += [f"{name:12} {note.value}  # {note.reason}" for name, note in plan.notes.items()]
    lines += [f"backend      {plan.recipe.backend} on {plan.recipe.device}, site kind {plan.site.kind}"]
    lines += [f"stages       {' -> '.join(STAGES)}", "", "environment"]
    lines += [f"  {name}={shlex.quote(str(v.value))}  # {v.reason}" for name, v in plan.environment.items()]
    lines += ["", "verl overrides"]
    lines += [f"  {o}  # {o.reason}" for o in plan.overrides]
    if stack := stacks.of_recipe(plan.recipe):
        environment = {name: str(value.value) for name, value in plan.environment.items()}
        lines += ["", "fixes of upstream code, each applied when its module is imported"]
        lines += [f"  {line}" for line in fixes.lines(plan.recipe, stack, environment)]
    lines += ["", "commands, node by node (ports are probed and may move when they are taken)"]
    lines += [f"  node{rank}: {shlex.join(command)}" for rank, command in enumerate(commands(plan))]
    return "\n".join(lines)


def commands(plan: Plan, attempt: int = 1) -> list[list[str]]:
    """The Ray command of each node, as it would be with every planned port free."""
    nodes = [
        ray_node(plan, attempt, rank, address, planned_ports(plan, attempt, rank))
        for rank, address in enumerate(planned_addresses(plan))
    ]
    return [raycluster.start_command(plan.python, node, nodes[0].gcs_address) for node in nodes]


def ray_node(plan: Plan, attempt: int, rank: int, address: str, port_plan: ports.PortPlan) -> raycluster.RayNode:
    """The Ray node of a rank."""
    return raycluster.RayNode(
        rank=rank,
        name=f"node{rank}",
        address=address,
        ports=port_plan,
        temp=plan.ray_temp(attempt, rank),
        devices=plan.devices_per_node,
        object_store_mb=plan.site.ray.object_store_mb,
    )


def planned_addresses(plan: Plan) -> list[str]:
    """What can be known of the nodes' addresses before the job runs: all of them on one machine, else placeholders."""
    if plan.site.shares_host:
        return [local_address(rank) for rank in range(plan.nodes)]
    return [f"<address of node{rank}>" for rank in range(plan.nodes)]


def planned_ports(plan: Plan, attempt: int, rank: int) -> ports.PortPlan:
    """The ports of a node if none is taken; on one machine each node has its own."""
    slot, slots = port_slot(plan, rank)
    return ports.plan(port_seed(plan, attempt), slot, slots)


def port_seed(plan: Plan, attempt: int) -> str:
    return f"{plan.run}/{attempt}"


def port_slot(plan: Plan, rank: int) -> tuple[int, int]:
    """This node's number among those that share its host, and how many they are."""
    return (rank, plan.nodes) if plan.site.shares_host else (0, 1)


def local_address(rank: int) -> str:
    """Loopback has 16 million addresses: each node of a local run has its own, so nodes look like hosts to verl."""
    return f"127.0.{1 + rank // 250}.{1 + rank % 250}"
