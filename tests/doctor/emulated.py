"""An Ascend node of two NPUs in a folder: files, installed packages, and tools that print what a file says.

The formats are those of the documentation named in atlasrl.doctor.devices and links; the numbers are made up.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import namedtuple
from dataclasses import replace
from functools import cache
from pathlib import Path

from atlasrl.doctor import expected as expectations
from atlasrl.doctor.expected import Expected
from atlasrl.doctor.finding import Report
from atlasrl.doctor.host import Host

Usage = namedtuple("Usage", "total used free")
GIB = 2**30
DEVICES = 2
TOOL = """\
#!/bin/sh
while IFS= read -r line; do echo "$line"; done <"${0%/*}/../said/${0##*/} $*"
"""  # builtins only: hundreds of calls a test run

HEADER = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0.3                 Version: 24.1.0.3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
CHIP = """\
| {n}     910B3               | OK            | 95.{n}        4{n}                0    / 0             |
| 0                         | 0000:C{n}:00.0  | 0           0    / 0          331{n} / 65536         |
+===========================+===============+====================================================+
"""
PROCESSES = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
"""
IDLE = "| No running processes found in NPU {n}                                                            |\n"
BOARD = """\
NPU ID                         : {n}
Software Version               : 24.1.0.3
Firmware Version               : 7.5.0.5.220
Compatibility                  : OK
"""
ECC = """\
NPU ID                                   : {n}
HBM Single Bit Error Count               : 0
HBM Double Bit Error Count               : 0
HBM Double Bit Isolated Pages Count      : 0
"""
PORT = {
    "ip": "ipaddr:10.20.0.{n}\nnetmask:255.255.255.0\n",
    "link": "link status: UP\n",
    "net_health": "net health status: Success\n",
    "tls": "dev_id:{n}, tls switch[0](0:disable, 1:enable), tls preconfigured[1](0:non-preset, 1:preset)\n",
    "stat": "packet statistics:\nmac_tx_pfc_pkt_num:12\nroce_rx_err_pkt_num:0\nroce_tx_err_pkt_num:0\n",
}
CANN = "/usr/local/Ascend/ascend-toolkit/latest"
FILES = {
    "/usr/local/Ascend/driver/version.info": "Version=24.1.0.3\ncompatible_version_fw=[7.0.0,7.5.99]\n",
    "/usr/local/Ascend/firmware/version.info": "Version=7.5.0.5.220\nfirmware_version=1.0\n",
    f"{CANN}/aarch64-linux/ascend_toolkit_install.info": "package_name=Ascend-cann-toolkit\nversion=8.2.RC2\n",
    "/proc/meminfo": "MemTotal:  1583000000 kB\nHugePages_Total:  0\nHugepagesize:  2048 kB\n",
    "/proc/mounts": "/dev/sda1 / ext4 rw 0 0\nfiler:/rl /shared nfs4 rw 0 0\n",
    "/proc/net/route": "Iface\tDestination\nenp67s0f5\t00000A0A\n",
    "/sys/class/net/enp67s0f5/operstate": "up\n",
    "/sys/class/net/enp67s0f5/mtu": "1500\n",
    "/sys/class/net/lo/operstate": "unknown\n",
    "/sys/fs/cgroup/pids.max": "max\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
}
ATTENTION = "mindspeed/core/transformer/dot_product_attention.py"
SOURCES = {
    "mbridge/__init__.py": '__version__ = "0.1.0"\n',
    "mbridge/models/ext/deepseek_v3/dequant_fp8_safetensor_io.py": 'safe_open(safetensor_file, device="cuda")\n',
    ATTENTION: "scale = self.softmax_scale\noutput = torch_npu.npu_fusion_attention(q, k, v, scale=scale)\n",
    "vllm_ascend/_build_info.py": "__soc_version__ = 'ASCEND910B1'\n__sleep_mode_enabled__ = True\n",
    "megatron/core/transformer/multi_latent_attention.py": (
        "class MLASelfAttention:\n"
        "    def __init__(self, submodules):\n"
        "        build_module(submodules.linear_kv_down_proj)\n"
    ),
}


@cache
def expected_node() -> Expected:
    known = expectations.of(
        "npu", stack_name="a2-article", devices=DEVICES, nic="enp67s0f5", paths=(Path("/shared/runs"),)
    )
    return replace(known, imports=tuple(name for name in known.imports if name != "safetensors"))


class Node:
    """A healthy node; a test then breaks one thing of it."""

    def __init__(self, root: Path, name: str = "node00", first_address: int = 10):
        self.root, self.name = root, name
        self.site = root / "site"
        self.environment = {
            "PATH": f"{root / 'bin'}:{os.defpath}",
            "PYTHONPATH": str(self.site),
            "ASCEND_TOOLKIT_HOME": CANN,
            "ATB_HOME_PATH": "/usr/local/Ascend/nnal/atb/latest/atb",
            "LD_LIBRARY_PATH": f"{CANN}/lib64:/usr/local/Ascend/driver/lib64",
        }
        self.shm = Usage(700 * GIB, 0, 700 * GIB)
        self.disk = Usage(10**13, 0, 10**13)
        self.open_files = (65536, 65536)
        self.clock = time.time
        for file, text in FILES.items():
            self.write(file, text)
        for folder in ("/shared/runs", "/tmp", "/dev/shm"):
            (root / folder.lstrip("/")).mkdir(parents=True)
        for device in ("davinci_manager", "devmm_svm", "hisi_hdc", "davinci0", "davinci1"):
            self.write(f"/dev/{device}", "")
        self._say_tools(first_address)
        self._install_packages()

    def host(self) -> Host:
        return Host(
            root=self.root,
            environment=self.environment,
            name=self.name,
            python=sys.executable,
            site=(self.site,),
            clock=self.clock,
            usage=lambda path: self.shm if path.name == "shm" else self.disk,
            limit=lambda which: self.open_files if which == resource.RLIMIT_NOFILE else (65536, 65536),
        )

    def examine(self, *, without: tuple[str, ...] = ("imports",)) -> Report:
        from atlasrl.doctor import examine

        return examine(self.host(), expected_node(), without=without)

    def write(self, file: str, text: str) -> None:
        path = self.root / file.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def change(self, file: str, old: str, new: str) -> None:
        text = (self.root / file.lstrip("/")).read_text()
        assert old in text, f"{file} does not say {old!r}"
        self.write(file, text.replace(old, new, 1))

    def remove(self, file: str) -> None:
        (self.root / file.lstrip("/")).unlink()

    def install(self, name: str, version: str) -> None:
        for old in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            (old / "METADATA").unlink()
            old.rmdir()
        folder = f"/site/{name.replace('-', '_')}-{version}.dist-info"
        self.write(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def _say_tools(self, first_address: int) -> None:
        for tool in ("npu-smi", "hccn_tool"):
            self.write(f"/bin/{tool}", TOOL)
            (self.root / "bin" / tool).chmod(0o755)
        table = HEADER + "".join(CHIP.format(n=n) for n in range(DEVICES))
        idle = PROCESSES + "".join(IDLE.format(n=n) for n in range(DEVICES))
        self.write("/said/npu-smi info", table + idle)
        self.write("/said/hccn_tool -h", "Usage: hccn_tool\n")
        for n in range(DEVICES):
            self.write(f"/said/npu-smi info -t board -i {n}", BOARD.format(n=n))
            self.write(f"/said/npu-smi info -t ecc -i {n}", ECC.format(n=n))
            for topic, text in PORT.items():
                number = first_address + n if topic == "ip" else n
                self.write(f"/said/hccn_tool -i {n} -{topic} -g", text.format(n=number))

    def _install_packages(self) -> None:
        for name, version in expected_node().packages.items():
            self.install(name, version)
        for module in expected_node().imports:
            self.write(f"/site/{module.replace('.', '/')}/__init__.py", "")
        for file, text in SOURCES.items():
            self.write(f"/site/{file}", text)
