"""Each fault of docs/doctor.md, planted on an emulated node: it is found, and nothing else is said."""

import re
import time
from pathlib import Path

import pytest
from emulated import ATTENTION, CANN, GIB, Node, Usage

DOCS = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"


LATENT = "/site/megatron/core/transformer/multi_latent_attention.py"
OTHER_CODE = "class MLASelfAttention:\n    def __init__(self):\n        pass\n"
WRONG_SCALE = "scale = 1.0 / math.sqrt(self.hidden_size_per_attention_head)\nnpu_fusion_attention(q)\n"
TOOLKIT = "/usr/local/Ascend/ascend-toolkit"
TWO_CANNS = f"{TOOLKIT}/8.2.RC2/lib64:{TOOLKIT}/8.0.RC3/lib64"


def write(file, text):
    return lambda node: node.write(file, text)


def change(file, old, new):
    return lambda node: node.change(file, old, new)


def remove(file):
    return lambda node: node.remove(file)


def install(name, version):
    return lambda node: node.install(name, version)


def export(**variables):
    return lambda node: node.environment.update(variables)


def unset(name):
    return lambda node: node.environment.pop(name)


def become(attribute, value):
    return lambda node: setattr(node, attribute, value)


def lose_device(node):
    text = (node.root / "said/npu-smi info").read_text()
    node.write("/said/npu-smi info", re.sub(r"\| 1     910B3.*?\+=+\+=+\+=+\+\n", "", text, flags=re.DOTALL))


def busy_device(node):
    idle = re.search(r"\| No running processes found in NPU 1 +\|", (node.root / "said/npu-smi info").read_text())[0]
    node.change("/said/npu-smi info", idle, "| 1       0                 | 4242          | python | 30780 |")
    node.write("/proc/4242/cmdline", "python\0-m\0somebody.train\0")


def hanging_driver(node):
    node.write(
        "/bin/npu-smi",
        "#!/bin/sh\necho 'dcmi model initialized failed, because the device is used. ret is -8020'\nexit 1\n",
    )


# What npu-smi, hccn_tool and the driver say. id, how it is planted, name of the finding, state, a word of what it says
TOOL_FAULTS = [
    ("npu-smi-fails", hanging_driver, "npu-smi", "error", "ret is -8020"),
    ("npu-smi-missing", remove("/bin/npu-smi"), "npu-smi", "error", "not installed"),
    ("device-lost", lose_device, "devices", "error", "1 NPUs"),
    (
        "device-warning",
        change("/said/npu-smi info", "910B3               | OK     ", "910B3 | Warning"),
        "health",
        "error",
        "NPU 0 is Warning",
    ),
    ("device-file-missing", remove("/dev/davinci1"), "device files", "error", "/dev/davinci1"),
    ("hbm-small", change("/said/npu-smi info", "3310 / 65536", "3310 / 32768"), "HBM", "error", "32768"),
    ("hbm-held", change("/said/npu-smi info", "3311 / 65536", "61311/ 65536"), "HBM", "error", "61311"),
    ("device-busy", busy_device, "leftover processes", "error", "4242 (python -m somebody.train)"),
    ("device-hot", change("/said/npu-smi info", "40   ", "97   "), "temperature", "warn", "97"),
    (
        "memory-faults",
        change(
            "/said/npu-smi info -t ecc -i 1", "Double Bit Error Count               : 0", "Double Bit Error Count : 3"
        ),
        "memory faults",
        "error",
        "3 uncorrectable",
    ),
    (
        "memory-pages",
        change("/said/npu-smi info -t ecc -i 0", "Isolated Pages Count      : 0", "Isolated Pages Count : 7"),
        "memory faults",
        "warn",
        "7 HBM pages",
    ),
    (
        "firmware-board",
        change("/said/npu-smi info -t board -i 0", ": OK", ": Not OK"),
        "firmware",
        "error",
        "not compatible",
    ),
    (
        "firmware-range",
        change("/usr/local/Ascend/firmware/version.info", "7.5.0.5", "7.8.0.5"),
        "firmware",
        "error",
        "7.0.0 to 7.5.99",
    ),
    (
        "driver-version",
        change("/usr/local/Ascend/driver/version.info", "24.1.0.3", "24.1.rc1"),
        "driver",
        "error",
        "24.1.rc1 found",
    ),
    ("driver-missing", remove("/usr/local/Ascend/driver/version.info"), "driver", "error", "missing"),
    ("port-no-address", write("/said/hccn_tool -i 1 -ip -g", "ipaddr:\nnetmask:\n"), "NPU address", "error", "NPU 1"),
    ("port-down", change("/said/hccn_tool -i 0 -link -g", "UP", "DOWN"), "link", "error", "NPU 0: link is DOWN"),
    (
        "port-gateway",
        change("/said/hccn_tool -i 0 -net_health -g", "Success", "Detect Ip Timeout"),
        "net health",
        "error",
        "Timeout",
    ),
    (
        "port-errors",
        change("/said/hccn_tool -i 1 -stat -g", "rx_err_pkt_num:0", "rx_err_pkt_num:13"),
        "transfer errors",
        "warn",
        "roce_rx_err_pkt_num 13",
    ),
    ("hccn-missing", remove("/bin/hccn_tool"), "hccn_tool", "error", "not installed"),
]
OTHER_FAULTS = [
    ("cann-not-sourced", unset("ASCEND_TOOLKIT_HOME"), "CANN", "error", "not sourced"),
    ("nnal-not-sourced", unset("ATB_HOME_PATH"), "NNAL", "error", "ATB_HOME_PATH"),
    ("cann-elsewhere", export(ASCEND_TOOLKIT_HOME="/opt/cann"), "CANN", "error", "/opt/cann"),
    (
        "cann-version",
        change(f"{CANN}/aarch64-linux/ascend_toolkit_install.info", "8.2.RC2", "8.0.RC3"),
        "CANN",
        "error",
        "8.0.RC3 found",
    ),
    ("cann-mixed", export(LD_LIBRARY_PATH=TWO_CANNS), "CANN", "error", "mixes"),
    ("visible-devices", export(ASCEND_RT_VISIBLE_DEVICES="0,1"), "environment", "error", "hides"),
    (
        "expandable-segments",
        export(PYTORCH_NPU_ALLOC_CONF="expandable_segments: True"),
        "environment",
        "error",
        "sleep mode",
    ),
    ("launch-blocking", export(ASCEND_LAUNCH_BLOCKING="1"), "environment", "warn", "every kernel"),
    ("hccl-timeout", export(HCCL_CONNECT_TIMEOUT="30"), "environment", "error", "120 to 7200"),
    ("package-version", install("mbridge", "0.15.1"), "versions", "error", "mbridge 0.13.1 expected, 0.15.1 found"),
    ("softmax-scale", write(f"/site/{ATTENTION}", WRONG_SCALE), "softmax_scale", "error", "ignores softmax_scale"),
    ("mbridge-device", export(ATLASRL_WITHOUT_FIX="mbridge-device"), "fix mbridge-device", "warn", "which no NPU is"),
    ("vllm-cuda-build", write("/site/vllm/_C.abi3.so", ""), "vllm", "error", "CUDA build"),
    (
        "no-sleep-mode",
        change("/site/vllm_ascend/_build_info.py", "True", "False"),
        "vllm-ascend",
        "error",
        "cannot sleep",
    ),
    (
        "two-tritons",
        install("triton", "3.2.0"),
        "triton",
        "error",
        "both installed",
    ),
    ("flash-attn", install("flash-attn", "2.7.4"), "packages", "warn", "flash-attn"),
    ("fix-has-no-place", write(LATENT, OTHER_CODE), "fix mla-rotary-key", "error", "not the code it mends"),
    ("fix-switched-off", export(ATLASRL_WITHOUT_FIX="mla-rotary-key"), "fix mla-rotary-key", "warn", "switched off"),
    ("open-files", become("open_files", (1024, 1048576)), "open files", "error", "1024"),
    ("few-tasks", write("/sys/fs/cgroup/pids.max", "4096\n"), "tasks", "error", "4096"),
    ("shm-small", become("shm", Usage(2**26, 0, 2**26)), "/dev/shm", "error", "--shm-size"),
    ("shm-full", become("shm", Usage(700 * GIB, 699 * GIB, GIB)), "/dev/shm", "error", "leftovers"),
    (
        "huge-pages",
        change("/proc/meminfo", "HugePages_Total:  0", "HugePages_Total:  400000"),
        "huge pages",
        "warn",
        "reserved",
    ),
    (
        "powersave",
        write("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n"),
        "cpu",
        "warn",
        "powersave",
    ),
    ("not-mounted", lambda n: (n.root / "shared/runs").rmdir(), "folders", "error", "/shared/runs is not there"),
    ("disk-full", become("disk", Usage(10**13, 10**13, 10**9)), "disk", "error", "1.0 GB free"),
    ("clock", become("clock", lambda: time.time() + 7), "clock", "warn", "ahead of"),
    ("clock-far", become("clock", lambda: time.time() - 900), "clock", "error", "behind"),
    ("interface-missing", remove("/sys/class/net/enp67s0f5/operstate"), "interface", "error", "this node has"),
    ("interface-down", write("/sys/class/net/enp67s0f5/operstate", "down\n"), "interface", "error", "is down"),
    ("interface-no-ipv4", write("/proc/net/route", "Iface\n"), "interface", "error", "no IPv4"),
]


def test_a_healthy_node_is_silent(tmp_path):
    report = Node(tmp_path / "node").examine(without=())
    assert [str(finding) for finding in report.findings if finding.state != "ok"] == []
    assert {"devices", "links", "driver", "CANN", "versions", "imports", "softmax_scale", "interface", "fixes"} <= {
        finding.name for finding in report.findings
    }


def check(node, plant, name, state, word, *without):
    plant(node)
    said = [finding for finding in node.examine(without=("imports", *without)).findings if finding.state != "ok"]
    assert {(finding.name, finding.state) for finding in said} == {(name, state)}, said
    assert word in str(said[0])
    assert said[0].remedy


@pytest.mark.parametrize(("fault", "expected"), [(f[1], f[2:]) for f in TOOL_FAULTS], ids=[f[0] for f in TOOL_FAULTS])
def test_what_the_tools_say_is_found_and_nothing_else_is_said(tmp_path, fault, expected):
    check(Node(tmp_path / "node"), fault, *expected)


@pytest.mark.parametrize(("fault", "expected"), [(f[1], f[2:]) for f in OTHER_FAULTS], ids=[f[0] for f in OTHER_FAULTS])
def test_a_fault_of_stack_or_machine_is_found_and_nothing_else_is_said(tmp_path, fault, expected):
    check(Node(tmp_path / "node"), fault, *expected, "devices", "links")


def test_an_import_that_fails_and_one_that_ends_the_interpreter_are_named(tmp_path):
    node = Node(tmp_path / "node")
    node.write("/site/vllm/__init__.py", "raise OSError('libascendcl.so: cannot open shared object file')\n")
    node.write("/site/mbridge/__init__.py", "import os; os._exit(139)\n")
    said = [str(finding) for finding in node.examine(without=()).findings if finding.state == "error"]
    assert len(said) == 2
    assert "import vllm: OSError: libascendcl.so" in said[0]
    assert "import mbridge ended the interpreter (exit code 139)" in said[1]


def test_a_check_that_breaks_hides_no_other(tmp_path):
    node = Node(tmp_path / "node")
    node.change("/said/npu-smi info", "3310 / 65536", "3310")
    node.change("/said/hccn_tool -i 0 -link -g", "UP", "DOWN")
    names = {finding.name for finding in node.examine().findings if finding.state == "error"}
    assert names == {"devices", "link"}


def test_the_documented_table_is_the_tested_one():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", DOCS.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(fault[0] for fault in TOOL_FAULTS + OTHER_FAULTS)
    assert len(rows) >= 20
