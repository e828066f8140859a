"""The stack of a node: driver, firmware, CANN and its environment, package versions, imports."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator

from atlasrl.doctor.expected import Expected
from atlasrl.doctor.finding import Fact, Finding, error, ok, warn
from atlasrl.doctor.host import Host, normalised

DRIVER = "/usr/local/Ascend/driver/version.info"
FIRMWARE = "/usr/local/Ascend/firmware/version.info"
SOURCE_CANN = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
SOURCE_NNAL = "source /usr/local/Ascend/nnal/atb/set_env.sh"
IMPORT_SECONDS = 300.0

# Says each name before and after, so that a package that takes the interpreter down is named.
IMPORTER = """
import importlib, json, sys
for name in sys.argv[1:]:
    print(json.dumps({"name": name}), flush=True)
    try:
        importlib.import_module(name)
        problem = None
    except BaseException as raised:
        problem = f"{type(raised).__name__}: {raised}"
    print(json.dumps({"name": name, "problem": problem}), flush=True)
"""


def check_versions(host: Host, expected: Expected) -> Iterator[Finding | Fact]:
    """Expected against found, one line a difference."""
    yield Fact("python", platform.python_version())
    wrong = 0
    for name, wanted in expected.packages.items():
        found = host.packages.get(normalised(name)) or _version_in_code(host, name)
        yield Fact(f"version of {name}", found or "none")
        if found is None:
            yield error("versions", f"{name} {wanted} expected, not installed", _remedy(expected))
        elif found.partition("+")[0] != wanted:  # +cpu and the like name a build, not a version
            yield error("versions", f"{name} {wanted} expected, {found} found", _remedy(expected))
        else:
            continue
        wrong += 1
    if not wrong:
        yield ok("versions", f"{len(expected.packages)} packages as pinned")


def _version_in_code(host: Host, name: str) -> str | None:
    """Megatron-core on an NPU is usually a clone on PYTHONPATH, without metadata."""
    text = host.source("megatron/core/package_info.py") if name == "megatron-core" else None
    numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH)\s*=\s*(\d+)", text or "", re.MULTILINE)
    return ".".join(numbers) if len(numbers) == 3 else None


def _remedy(expected: Expected) -> str:
    return "env/setup.sh cpu" if expected.device == "cpu" else "use the image of this stack on every node"


def check_imports(host: Host, expected: Expected) -> Iterator[Finding]:
    """Import each package in a process of its own: without CANN, torch_npu may end the interpreter."""
    answer = host.run(host.python, "-c", IMPORTER, *expected.imports, seconds=IMPORT_SECONDS)
    lines = [json.loads(line) for line in (answer.text if answer else "").splitlines() if line.startswith('{"name"')]
    finished = {line["name"]: line["problem"] for line in lines if "problem" in line}
    for name, problem in finished.items():
        if problem:
            yield error(
                "imports", f"import {name}: {problem[:300]}", f"try it by hand: {host.python} -c 'import {name}'"
            )
    started = [line["name"] for line in lines if "problem" not in line]
    if len(finished) < len(expected.imports):
        last = started[-1] if started else host.python
        code = answer.code if answer else "none"
        yield error(
            "imports", f"import {last} ended the interpreter (exit code {code})", "is the CANN environment sourced?"
        )
    elif not any(finished.values()):
        yield ok("imports", f"{len(finished)} packages")


def check_driver(host: Host, expected: Expected) -> Iterator[Finding | Fact]:
    """Version of the driver, and whether the firmware is one that it takes."""
    driver, firmware = _info(host, DRIVER), _info(host, FIRMWARE)
    found = driver.get("Version")
    if found is None:
        yield error("driver", f"{DRIVER} is missing", "install the driver, or mount it into the container")
        return
    yield Fact("driver", found)
    if expected.driver and found != expected.driver:
        yield error("driver", f"{expected.driver} expected, {found} found", "install the same driver on every node")
    else:
        yield ok("driver", found)
    span = re.fullmatch(r"\[([\d.]+),([\d.]+)\]", driver.get("compatible_version_fw", ""))
    version = firmware.get("Version")
    if version and span and not _numbers(span[1]) <= _numbers(version)[:3] <= _numbers(span[2]):
        what = f"{version}, and driver {found} takes {span[1]} to {span[2]}"
        yield error("firmware", what, "install the firmware of the driver's package, then restart the node")


def check_cann(host: Host, expected: Expected) -> Iterator[Finding | Fact]:
    """CANN's variables are set, lead to one installation, and that one is of the expected version."""
    home = host.environment.get("ASCEND_TOOLKIT_HOME") or host.environment.get("ASCEND_HOME_PATH")
    if not home:
        yield error(
            "CANN", "its environment is not sourced (no ASCEND_TOOLKIT_HOME)", f"site file, setup: {SOURCE_CANN}"
        )
        return
    if not host.path(home).is_dir():
        yield error("CANN", f"ASCEND_TOOLKIT_HOME={home} is no folder here", "source set_env.sh on the node itself")
        return
    if not host.environment.get("ATB_HOME_PATH"):
        yield error("NNAL", "its environment is not sourced (no ATB_HOME_PATH)", f"site file, setup: {SOURCE_NNAL}")
    files = sorted(host.path(home).glob("*-linux/ascend_toolkit_install.info"))
    version = _fields(files[0].read_text()).get("version") if files else None
    yield Fact("CANN", version or "unknown")
    if version != expected.cann:
        yield error("CANN", f"{expected.cann} expected, {version or 'unknown'} found in {home}", f"{SOURCE_CANN}")
    else:
        yield ok("CANN", version)
    named = re.findall(r"ascend-toolkit/(\d[^/:]*)/", host.environment.get("LD_LIBRARY_PATH", ""))
    if len(set(named)) > 1:
        what = f"LD_LIBRARY_PATH mixes CANN {' and '.join(sorted(set(named)))}"
        yield error("CANN", what, "source set_env.sh of one installation, in a fresh shell")


def check_variables(host: Host, expected: Expected) -> Iterator[Finding]:
    """Variables of the shell that reach every process and change what runs."""
    env = host.environment
    if visible := env.get("ASCEND_RT_VISIBLE_DEVICES"):
        what = f"ASCEND_RT_VISIBLE_DEVICES={visible} hides devices from Ray"
        yield error("environment", what, "unset it; Ray shows each worker its device")
    if "expandable_segments:true" in env.get("PYTORCH_NPU_ALLOC_CONF", "").replace(" ", "").lower():
        what = "PYTORCH_NPU_ALLOC_CONF has expandable_segments:True, which vLLM-Ascend's sleep mode refuses"
        yield error("environment", what, "unset it; verl switches it itself between the phases")
    if env.get("ASCEND_LAUNCH_BLOCKING") == "1":
        yield warn("environment", "ASCEND_LAUNCH_BLOCKING=1: every kernel is waited for", "unset it after debugging")
    timeout = env.get("HCCL_CONNECT_TIMEOUT", "")
    if timeout.isdigit() and not 120 <= int(timeout) <= 7200:
        yield error(
            "environment", f"HCCL_CONNECT_TIMEOUT={timeout} is outside 120 to 7200", "unset it; the plan sets it"
        )


def _info(host: Host, file: str) -> dict[str, str]:
    return _fields(host.read(file) or "")


def _fields(text: str) -> dict[str, str]:
    return {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in text.splitlines())}


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
