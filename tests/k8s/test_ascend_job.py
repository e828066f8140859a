"""The AscendJob: what the operator demands, one node process a pod with the right rank, nothing read by a shell."""

import copy
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from atlasrl import k8s, k8s_runs
from atlasrl import plan as plans
from atlasrl import recipe as recipes
from atlasrl.errors import UsageFault
from atlasrl.launch import canary
from atlasrl.rundir import RunDir
from atlasrl.site import Site

ROOT = Path(__file__).resolve().parents[2]
POD = k8s.Pods(image="registry.local:5000/verl@sha256:0123", mounts=(Path("/opt/wheels"),))
SITE = Site(kind="slurm", nic="enp67s0f5")


def planned(folder, nodes=32, recipe="deepseek-v3-671b-dapo", site=SITE, **changes):
    run = RunDir(folder)
    loaded = recipes.load(recipe, [f"{key}={value}" for key, value in changes.items()])
    return plans.make(loaded, site, run, nodes=nodes)


def job(folder, pods=POD, **options):
    plan = planned(folder, **options)
    return k8s.job(plan, plan.rundir.attempt(1), pods)


def container(tree, role="Master"):
    return tree["spec"]["replicaSpecs"][role]["template"]["spec"]["containers"][0]


def test_a_job_of_32_nodes_survives_yaml_and_is_valid(tmp_path):
    tree = job(tmp_path / "run")
    k8s.check(tree)
    text = k8s.text(tree)
    assert yaml.safe_load(text) == tree
    assert "&id" not in text and "*id" not in text
    assert tree["spec"]["runPolicy"]["schedulingPolicy"]["minAvailable"] == 32
    assert tree["spec"]["replicaSpecs"]["Worker"]["replicas"] == 31
    for role in ("Master", "Worker"):
        sizes = container(tree, role)["resources"]
        assert sizes["limits"] == sizes["requests"] == {"huawei.com/Ascend910": 8}


def test_every_folder_of_the_plan_is_mounted_once_at_its_own_path(tmp_path):
    tree = job(tmp_path / "run")
    mounts = [mount["mountPath"] for mount in container(tree)["volumeMounts"]]
    for needed in ("/models/DeepSeek-V3", "/data", "/opt/wheels", str(tmp_path), str(ROOT), "/dev/shm"):
        assert mounts.count(needed) == 1, needed
    names = [volume["name"] for volume in tree["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["volumes"]]
    assert sorted(mount["name"] for mount in container(tree, "Worker")["volumeMounts"]) == sorted(names)


@pytest.mark.parametrize(
    ("break_it", "where"),
    [
        (lambda tree: container(tree).update(name="trainer"), "ascend"),
        (lambda tree: container(tree)["ports"][0].update(name="port"), "ports"),
        (lambda tree: container(tree)["resources"]["limits"].update({"huawei.com/Ascend910": 0}), "resources.limits"),
        (lambda tree: container(tree).update(image="a b"), "image"),
        (lambda tree: tree["metadata"].update(name="Run_1"), "metadata.name"),
        (lambda tree: tree["spec"].update(schedulerName="default-scheduler"), "schedulerName"),
        (lambda tree: tree["spec"]["replicaSpecs"]["Master"].update(replicas=2), "Master.replicas"),
        (lambda tree: tree["spec"]["replicaSpecs"]["Worker"].update(restartPolicy="Always"), "restartPolicy"),
        (lambda tree: tree["spec"]["replicaSpecs"]["Worker"].update(replicas=3), "minAvailable"),
        (lambda tree: tree["spec"].update(elasticity=1), "elasticity"),
        (lambda tree: tree.pop("kind"), "kind"),
    ],
)
def test_a_broken_job_is_refused_with_its_place(tmp_path, break_it, where):
    tree = copy.deepcopy(job(tmp_path / "run"))
    break_it(tree)
    with pytest.raises(UsageFault, match=re.escape(where)):
        k8s.check(tree)


def as_kubernetes_expands(word, env):
    """$(NAME) of a known name becomes its value, $$ becomes $; what is left is untouched."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0]), word)


def run_pod(tree, rank, fake_python):
    """What the pod's shell starts, with a program in place of Python that reports its arguments."""
    env = {"RANK": str(rank), "LOCAL_RANK": "0,1", "WORLD_SIZE": "256", "MASTER_ADDR": "10.0.0.1", "PATH": os.defpath}
    part = container(tree, "Master" if rank == 0 else "Worker")
    words = [as_kubernetes_expands(word, env) for word in part["command"] + part["args"]]
    words[3] = str(fake_python)
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["run", "it's a $(RANK) run; touch broken #", 'run "$HOME" `id`'])
def test_each_pod_starts_its_rank_and_no_path_is_read_by_a_shell(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    tree = job(tmp_path / name, nodes=32)
    logs = tmp_path / name / "attempts" / "0001" / "logs"
    logs.mkdir(parents=True)
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\nfor word; do echo "<$word>"; done\nenv | grep -c -E "RANK|WORLD_SIZE|MASTER"\nexit 85\n'
    )
    fake.chmod(0o755)
    for rank in (0, 31):
        done = run_pod(yaml.safe_load(k8s.text(tree)), rank, fake)
        said = (logs / f"node{rank}.log").read_text().splitlines()
        assert said == ["<-m>", "<atlasrl.node>", f"<{tmp_path / name}>", "<1>", f"<{rank}>", "0"]
        assert done.returncode == 85
        assert f"node{rank}.log" in done.stdout
    assert not (tmp_path / "broken").exists()


def test_the_setup_of_the_site_runs_first_and_keeps_its_dollars(tmp_path):
    site = Site(kind="slurm", setup=["export CANN_SET=$(echo yes)"])
    tree = job(tmp_path / "run", site=site)
    (tmp_path / "run/attempts/0001/logs").mkdir(parents=True)
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$CANN_SET"\n')
    fake.chmod(0o755)
    run_pod(tree, 0, fake)
    assert (tmp_path / "run/attempts/0001/logs/node0.log").read_text() == "yes\n"


@pytest.mark.parametrize("name", ["A" * 100 + "_x.y", "run.1", "-a-", "9"])
def test_a_run_of_any_name_has_a_kubernetes_name(name):
    label = k8s.label(f"{name}-12")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?", label)
    assert label.endswith("-12")


def test_nodes_of_one_machine_and_other_devices_are_refused(tmp_path):
    with pytest.raises(UsageFault, match="machines of their own"):
        job(tmp_path / "run", recipe="tiny", nodes=2, site=Site())
    with pytest.raises(UsageFault, match="device: npu"):
        job(tmp_path / "run", recipe="tiny", nodes=2)


def test_a_written_run_has_plan_attempt_and_journal_and_can_be_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(canary, "NODE_LOCAL", ())
    request = k8s_runs.of_recipe(
        "deepseek-v3-671b-dapo", str(tmp_path), name="big", nodes=32, site_name=None, changes=[], oom=False
    )
    first = k8s_runs.write(request, POD)
    run = RunDir(tmp_path / "big")
    assert plans.load(run).nodes == 32
    assert json.loads(run.attempt(1).job.read_text())["resume_from"] is None
    assert run.events()[-1]["job"] == str(first)
    with pytest.raises(UsageFault, match="exists already"):
        k8s_runs.write(request, POD)
    again = k8s_runs.of_run("big", tmp_path)
    assert yaml.safe_load(k8s_runs.preview(again, POD))["metadata"]["name"] == "big-2"
    second = k8s_runs.write(again, POD)
    assert container(yaml.safe_load(second.read_text()))["args"][2] == "2"
    assert [event["attempt"] for event in run.events() if event["event"] == "submitted"] == [1, 2]


def test_a_job_that_would_be_refused_leaves_no_run(tmp_path):
    request = k8s_runs.of_recipe(
        "deepseek-v3-671b-dapo", str(tmp_path), name="big", nodes=32, site_name=None, changes=[], oom=False
    )
    with pytest.raises(UsageFault, match="image"):
        k8s_runs.write(request, k8s.Pods(image="no such; image"))
    assert list(tmp_path.iterdir()) == []
