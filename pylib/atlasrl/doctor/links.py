"""The RoCE port of each NPU through `hccn_tool`: address, link, health, TLS switch, transfer errors.

Formats: `hccn_tool -i N -ip|-link|-net_health|-tls|-stat -g`, as documented in Ascend/mind-cluster,
docs/en/faultdiag/user_guide/03_collecting_logs.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from atlasrl.doctor.expected import Expected
from atlasrl.doctor.finding import Fact, Finding, error, ok, warn
from atlasrl.doctor.host import Answer, Host

TOPICS = ("ip", "link", "net_health", "tls", "stat")
TLS = re.compile(r"tls switch\[(\d)\]")
HEALTHY = {"Success", "Init"}  # Init: no detection address is configured
ERRORS = ("roce_rx_err_pkt_num", "roce_tx_err_pkt_num", "roce_qp_status_err_num")


def check_links(host: Host, expected: Expected) -> Iterator[Finding | Fact]:
    """Each device's port. HCCL between nodes needs an address and an upright link on all of them."""
    if host.run("hccn_tool", "-h") is None:
        yield error("hccn_tool", "not installed", "mount /usr/local/Ascend/driver/tools into the container")
        return
    with ThreadPoolExecutor(max_workers=8) as pool:
        answers = list(pool.map(lambda number: _ask(host, number), range(expected.devices)))
    broken = 0
    for number, answer in enumerate(answers):
        said = list(_check_port(number, answer))
        broken += any(isinstance(one, Finding) for one in said)
        yield from said
    if not broken:
        yield ok("links", f"{expected.devices} ports up, each with an address")


def _ask(host: Host, number: int) -> dict[str, Answer]:
    """What the tool says of a device; topics that it does not know are left out."""
    answers = {topic: host.run("hccn_tool", "-i", str(number), f"-{topic}", "-g") for topic in TOPICS}
    return {topic: answer for topic, answer in answers.items() if answer}


def _check_port(number: int, answers: dict[str, Answer]) -> Iterator[Finding | Fact]:
    npu = f"NPU {number}"
    address = answers["ip"].fields.get("ipaddr")
    if not address:
        remedy = f"`hccn_tool -i {number} -ip -s address A netmask M`, or let the network team do it"
        yield error("NPU address", f"{npu} has no IP address", remedy)
    else:
        yield Fact(f"address of {npu}", address, unique=True)
    link = answers["link"].fields.get("link status", "unknown")
    if link != "UP":
        yield error(
            "link", f"{npu}: link is {link}", "cable, optical module or switch port; `hccn_tool -i N -optical -g`"
        )
    health = answers["net_health"].fields.get("net health status")
    if health and health not in HEALTHY:
        yield error(
            "net health", f"{npu}: {health}", "the gateway does not answer: address, VLAN and switch of the port"
        )
    if match := TLS.search(answers["tls"].text):
        yield Fact(f"TLS switch of {npu}", int(match[1]))
    wrong = {key: value for key, value in answers["stat"].fields.items() if key in ERRORS and value not in ("0", "")}
    if wrong:
        counts = ", ".join(f"{key} {value}" for key, value in wrong.items())
        yield warn(
            "transfer errors", f"{npu}: {counts}", "a slow or hanging collective starts here; look at the optics"
        )
