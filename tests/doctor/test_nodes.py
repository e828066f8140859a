"""Several nodes: differences, reports that travel as JSON, nodes that stay silent; and real formats of the tools."""

import json
import subprocess
from pathlib import Path

import pytest
from emulated import Node

from atlasrl.doctor import Report, differences
from atlasrl.doctor import nodes as many
from atlasrl.doctor import report as reports_as
from atlasrl.doctor.devices import parse_table
from atlasrl.doctor.examination import checks, refuse_unknown
from atlasrl.errors import UsageFault
from atlasrl.site import Site

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def three(tmp_path):
    return [Node(tmp_path / f"node{n}", f"node{n}", first_address=10 + 2 * n) for n in range(3)]


def examined(nodes, *only):
    without = tuple(name for name in checks("npu") if name != "imports" and only and name not in only)
    return [node.examine(without=("imports", *without)) for node in nodes]


def test_equal_nodes_do_not_differ(three):
    assert differences(examined(three)) == []


def test_the_odd_node_is_named_with_both_values(three):
    three[1].change("/said/npu-smi info -t board -i 0", "7.5.0.5.220", "7.1.0.9.220")
    (said,) = differences(examined(three, "devices"))
    assert said.name == "nodes differ: firmware of NPU 0"
    assert "7.1.0.9.220 on node1" in said.what and "7.5.0.5.220 on 2 others" in said.what


def test_a_folder_that_is_not_mounted_on_one_node_is_found_although_it_exists(three):
    three[2].write("/proc/mounts", "/dev/sda1 / ext4 rw 0 0\n")
    (said,) = differences(examined(three, "folders"))
    assert "file system of /shared/runs" in said.name
    assert "ext4 /dev/sda1 on node2" in said.what


def test_a_missing_memory_module_differs_and_a_few_pages_do_not(three):
    three[0].change("/proc/meminfo", "1583000000", "1582900000")
    assert differences(examined(three, "memory")) == []
    three[0].change("/proc/meminfo", "1582900000", "1516000000")
    assert [said.name for said in differences(examined(three, "memory"))] == ["nodes differ: host memory in GiB"]


def test_an_address_given_to_two_devices_is_found(three):
    three[0].write("/said/hccn_tool -i 1 -ip -g", "ipaddr:10.20.0.12\nnetmask:255.255.255.0\n")
    (said,) = differences(examined(three, "links"))
    assert "10.20.0.12" in said.what and "node0" in said.what and "node1" in said.what


def test_tls_on_one_node_only_is_found(three):
    three[1].change("/said/hccn_tool -i 0 -tls -g", "switch[0]", "switch[1]")
    assert [said.name for said in differences(examined(three, "links"))] == ["nodes differ: TLS switch of NPU 0"]


def test_reports_survive_json_between_other_lines(three):
    before = examined(three, "versions", "driver")
    lines = [json.dumps(reports_as.as_dict([report], [])) for report in before]
    after = many.read_reports("\n".join(["srun: job 7 started", *lines, "[1, 2]", "{torn"]))
    assert after == before and all(isinstance(report, Report) for report in after)


def test_one_finding_of_many_nodes_is_one_line(three):
    for node in three:
        node.change("/said/hccn_tool -i 0 -link -g", "UP", "DOWN")
    lines = reports_as.text(examined(three, "links"), []).splitlines()
    assert len(lines) == 2
    assert "[node0, node1, node2] link: NPU 0: link is DOWN" in lines[0]


def test_paths_and_setup_reach_the_shell_of_a_node_as_words(tmp_path):
    site = Site(setup=["export SET=1"])
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$SET"\nfor word; do echo "<$word>"; done\n')
    fake.chmod(0o755)
    hostile = f"/a b; touch {tmp_path / 'broken'}; $(id)"
    script = many.shell_script(site, str(fake), hostile, ["--path", hostile])
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == ["1", "<-m>", "<atlasrl.cli.doctor>", "<--path>", f"<{hostile}>", "<--json>"]
    assert not (tmp_path / "broken").exists()


def test_a_host_that_does_not_answer_is_an_error_and_the_others_are_reported(tmp_path, monkeypatch):
    Node(tmp_path / "node")
    line = json.dumps(reports_as.as_dict([Report("alive", "npu", [], [])], []))
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f"#!/bin/sh\ncase \"$*\" in *alive*) echo '{line}';; *) echo 'No route to host' >&2; exit 255;; esac\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    site = Site(kind="ssh", ssh={"hosts": ["alive", "gone"]})
    alive, gone = many.examine_nodes(site, None, "python", "", [])
    assert (alive.node, alive.failed) == ("alive", False)
    assert (gone.node, gone.failed) == ("gone", True) and "No route to host" in str(gone.findings[0])


def test_slurm_runs_one_task_a_node_and_counts_those_that_stay_silent(tmp_path, monkeypatch):
    lines = [json.dumps(reports_as.as_dict([Report(f"node{n}", "npu", [], [])], [])) for n in range(2)]
    srun = tmp_path / "srun"
    srun.write_text(
        f'#!/bin/sh\necho "$@" >{tmp_path}/asked\n'
        f"cat <<'END'\n{lines[0]}\n{lines[1]}\nEND\n"
        "echo 'srun: error: node2: task 2: Exited' >&2\nexit 1\n"
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    site = Site(kind="slurm", slurm={"partition": "npu", "account": "mine"})
    reports = many.examine_nodes(site, 3, "python", "", [])
    assert [report.node for report in reports] == ["node0", "node1", "1 of 3 nodes"]
    assert reports[2].failed and "task 2" in str(reports[2].findings[0])
    asked = (tmp_path / "asked").read_text()
    assert "--nodes=3 --ntasks-per-node=1" in asked and "--partition=npu --account=mine" in asked


def test_an_unknown_check_is_a_usage_error():
    with pytest.raises(UsageFault, match="softmax_scale"):
        refuse_unknown(["nonsense"], "npu")


def test_slurm_without_a_number_of_nodes_is_a_usage_error():
    with pytest.raises(UsageFault, match="--nodes"):
        many.examine_nodes(Site(kind="slurm"), None, "python", "", [])


@pytest.mark.parametrize(
    ("rows", "chips", "holders"),
    [
        (
            "| 0  xxx     | Warning            | 73.1   37   0    / 0   |\n"
            "| 0          | 0000:61:00.0  | 0   920  / 13553   30710/ 32768 |\n",
            [("Warning", 30710)],
            [],
        ),
        (
            "| 0     xxx          | OK            | -    32   0    / 0 |\n"
            "| 1     0            | 0000:9D:00.0  | 0   0  / 0   3130 / 65536 |\n",
            [("OK", 3130)],
            [],
        ),
        ("| 3       0                 | 139667        | python  | 30780     | 17 |\n", [], [(3, 139667)]),
        ("...\n| No running processes found in NPU 7       |\n", [], []),
    ],
    ids=["columns pushed right", "second die without power", "process with its id in the container", "idle"],
)
def test_variants_of_the_table_are_read(rows, chips, holders):
    found, held = parse_table(rows)
    assert [(chip.health, chip.hbm_used_mib) for chip in found] == chips
    assert [(holder.number, holder.pid) for holder in held] == holders


def test_the_command_examines_this_machine_and_merges(tmp_path):
    run = lambda *words, **more: subprocess.run([ROOT / "bin/doctor", *words], capture_output=True, text=True, **more)  # noqa: E731
    line = run("--device", "cpu", "--without", "imports", "--without", "versions", "--json").stdout
    assert json.loads(line)["nodes"][0]["device"] == "cpu"
    twin = line.replace('"node": "', '"node": "twin-of-').replace(
        '"architecture", "value": "', '"architecture", "value": "other-'
    )
    merged = run("--merge", input=line + twin)
    assert merged.returncode == 1 and "nodes differ: architecture" in merged.stdout
