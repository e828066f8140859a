"""The job as an AscendJob of MindCluster: one pod a node, each runs `python -m atlasrl.node RUN ATTEMPT RANK`.

Format: Ascend/mindcluster-deploy 21f282a3, verl-resche.yaml (volcano, no rank table). The operator sets RANK in each
pod; rank 0 is the Master. The container must be called `ascend` and its port `ascendjob-port`. Rescheduling by the
operator is off: a pod that started again would run the same attempt twice. `bin/k8s RUN --resume` writes the next one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlasrl import plan as plans
from atlasrl.errors import UsageFault
from atlasrl.plan import Plan
from atlasrl.rundir import AttemptDir

SCHEMA = Path(__file__).with_name("k8s_schema.json")
DEVICE = "huawei.com/Ascend910"
DRIVER = "/usr/local/Ascend/driver"
GRACE_SECONDS = 60
LABEL_LENGTH = 50  # of 63, since the operator appends `-worker-31`

# The operator's variables of torchrun would reach Ray's workers, each of which is another rank than its pod.
SCRIPT = """\
log="$3/node$RANK.log"; rank=$RANK
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
echo "node $rank: the log is $log"
exec "$0" -m atlasrl.node "$1" "$2" "$rank" >>"$log" 2>&1
"""


@dataclass(frozen=True)
class Pods:
    """What a cluster of pods needs beyond the plan."""

    image: str
    namespace: str = "default"
    queue: str = "default"
    architecture: str = "huawei-arm"
    mounts: tuple[Path, ...] = ()
    """Host folders to mount at the same path, beyond those that the plan names."""


def job(plan: Plan, attempt: AttemptDir, pods: Pods) -> dict[str, Any]:
    """The AscendJob as a tree. Pure.

    Raises:
        UsageFault: the plan is for nodes that share one machine, or not for NPUs.
    """
    if plan.site.shares_host:
        raise UsageFault("pods are machines of their own; give a site of kind slurm or ssh, or none")
    if plan.recipe.device != "npu":
        raise UsageFault(f"an AscendJob needs a recipe with device: npu, and this one has {plan.recipe.device}")
    name, labels = label(f"{plan.rundir.name}-{attempt.number}"), {"ring-controller.atlas": "ascend-910b"}
    template = {"metadata": {"labels": labels}, "spec": _pod(plan, attempt, pods)}
    replicas = {"Master": _replicas(1, template)}
    if plan.nodes > 1:
        replicas["Worker"] = _replicas(plan.nodes - 1, template)
    return {
        "apiVersion": "mindxdl.gitee.com/v1",
        "kind": "AscendJob",
        "metadata": {
            "name": name,
            "namespace": pods.namespace,
            "labels": {**labels, "framework": "pytorch", "fault-scheduling": "off"},
        },
        "spec": {
            "schedulerName": "volcano",
            "runPolicy": {"schedulingPolicy": {"minAvailable": plan.nodes, "queue": pods.queue}},
            "successPolicy": "AllWorkers",
            "replicaSpecs": replicas,
        },
    }


def text(tree: dict[str, Any]) -> str:
    """YAML without anchors, in the order of writing."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump(tree, Dumper=Plain, sort_keys=False, width=120)


def check(tree: dict[str, Any]) -> None:
    """Check a job against the committed schema and the rules that a schema cannot say.

    Raises:
        UsageFault: each violation with its place.
    """
    import jsonschema

    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    problems = validator.iter_errors(tree)
    wrong = [f"{'.'.join(map(str, problem.absolute_path)) or 'job'}: {problem.message}" for problem in problems]
    if not wrong:
        pods = sum(spec["replicas"] for spec in tree["spec"]["replicaSpecs"].values())
        if tree["spec"]["runPolicy"]["schedulingPolicy"]["minAvailable"] != pods:
            wrong.append(f"minAvailable must be the {pods} pods of Master and Worker: Ray waits for all of them")
    if wrong:
        raise UsageFault(f"not an AscendJob: {'; '.join(wrong)}")


def label(name: str) -> str:
    """A run's name as a Kubernetes name (RFC 1123): lower case, digits, hyphens; the end, which is unique, is kept."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[-LABEL_LENGTH:].strip("-")


def _replicas(count: int, template: dict) -> dict[str, Any]:
    return {"replicas": count, "restartPolicy": "Never", "template": template}


def _pod(plan: Plan, attempt: AttemptDir, pods: Pods) -> dict[str, Any]:
    devices = {DEVICE: plan.devices_per_node}
    recipe = plan.recipe
    files = [path.parent for path in (recipe.data.train, recipe.data.val, recipe.data.reward) if path]
    folders = [Path(plan.run).parent, plans.ROOT, Path(plan.model), Path(plan.model_input), *files]
    folders = _outermost([*folders, *plan.site.shared, *pods.mounts])
    volumes = [("driver", DRIVER, True), *((f"shared-{n}", str(folder), False) for n, folder in enumerate(folders))]
    mounts = [{"name": name, "mountPath": path, "readOnly": fixed} for name, path, fixed in volumes]
    script = "\n".join([*plan.site.setup, SCRIPT])
    container = {
        "name": "ascend",
        "image": pods.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/bash", "-c", _literal(script)],
        "args": [_literal(word) for word in (plan.python, plan.run, str(attempt.number), str(attempt.logs))],
        "env": [{"name": "PYTHONPATH", "value": _literal(str(plan.environment["PYTHONPATH"].value))}],
        "ports": [{"containerPort": 2222, "name": "ascendjob-port"}],
        "resources": {"limits": devices, "requests": devices},
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {
        "nodeSelector": {"host-arch": pods.architecture},
        "hostNetwork": True,  # HCCL and Ray use the host's addresses
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            *({"name": name, "hostPath": {"path": path, "type": "Directory"}} for name, path, _ in volumes),
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _literal(word: str) -> str:
    """Kubernetes expands $(NAME) in command, args and env; `$$` is how it writes a dollar."""
    return word.replace("$", "$$")


def _outermost(folders: Iterable[Path]) -> list[Path]:
    """Folders without those that lie in another one."""
    chosen: list[Path] = []
    for folder in sorted(set(folders)):
        if not any(folder.is_relative_to(outer) for outer in chosen):
            chosen.append(folder)
    return chosen
