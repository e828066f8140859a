"""All nodes at once: the same command on each, through Slurm or ssh, and one report a node."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from atlasrl.doctor.finding import Report, error
from atlasrl.errors import Fault, UsageFault
from atlasrl.site import Site

SECONDS = 900.0  # imports from a shared disk by 32 nodes at once


def examine_nodes(site: Site, nodes: int | None, python: str, pythonpath: str, options: Sequence[str]) -> list[Report]:
    """Run `bin/doctor --json` on every node of a site.

    Args:
        nodes: how many; None: all hosts of an ssh site.
        python: interpreter on the nodes.
        options: of the command, such as `--device npu`.

    Raises:
        Fault: no Slurm client here, or not one report came back.
        UsageFault: a Slurm site and no number of nodes, or a local one.
    """
    script = shell_script(site, python, pythonpath, options)
    if site.kind == "slurm":
        if nodes is None:
            raise UsageFault("how many nodes of the Slurm site? give --nodes N")
        return _through_slurm(site, nodes, script)
    if site.kind == "ssh":
        return _through_ssh(site, site.ssh.hosts[:nodes], script)
    raise UsageFault("a local site has one node: leave --nodes out")


def shell_script(site: Site, python: str, pythonpath: str, options: Sequence[str]) -> str:
    """What each node runs: the site's own set-up lines, then the command."""
    command = [python, "-m", "atlasrl.cli.doctor", *options, "--json"]
    return "\n".join([*site.setup, f"export PYTHONPATH={shlex.quote(pythonpath)}", f"exec {shlex.join(command)}"])


def slurm_command(site: Site, nodes: int, script: str) -> list[str]:
    """One task on each node; inside an allocation as a step of it."""
    slurm = site.slurm
    asked = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "reservation": slurm.reservation,
        "gres": slurm.gres,
    }
    options = [f"--{name}={value}" for name, value in asked.items() if value]
    task = ["bash", "-c", script]
    return ["srun", f"--nodes={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--quiet", *options, *task]


def read_reports(text: str) -> list[Report]:
    """The reports among the lines of output; what else the nodes said is skipped."""
    reports = []
    for line in text.splitlines():
        try:
            tree = json.loads(line)
        except ValueError:
            continue
        if isinstance(tree, dict):
            reports += [Report.from_dict(one) for one in tree.get("nodes", ())]
    return reports


def _through_slurm(site: Site, nodes: int, script: str) -> list[Report]:
    if shutil.which("srun") is None:
        raise Fault("srun is not on this machine; run it where the Slurm client is, or on each node without --nodes")
    answer = _run(slurm_command(site, nodes, script))
    reports = read_reports(answer.stdout)
    if not reports:
        words = [line for line in answer.stderr.splitlines() if line.strip()]
        raise Fault(f"no node reported; srun says: {words[-1] if words else f'exit code {answer.returncode}'}")
    if missing := nodes - len(reports):
        reports.append(_silent(f"{missing} of {nodes} nodes", answer.stderr))
    return reports


def _through_ssh(site: Site, hosts: list[str], script: str) -> list[Report]:
    from atlasrl.launch import ssh

    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        answers = list(pool.map(lambda host: _run(ssh.command(site.ssh, host), script), hosts))
    return [
        report
        for host, answer in zip(hosts, answers, strict=True)
        for report in (read_reports(answer.stdout) or [_silent(host, answer.stderr)])
    ]


def _run(command: list[str], script: str = "") -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, input=script, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {SECONDS:.0f} s")


def _silent(node: str, said: str) -> Report:
    words = [line for line in said.splitlines() if line.strip()]
    finding = error("no report", words[-1].strip() if words else "it said nothing", "log in and run bin/doctor there")
    return Report(node, "unknown", [finding], [])
