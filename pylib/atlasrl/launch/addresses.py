"""The IPv4 address by which the other nodes reach this one, and the variables that must agree with it.

Never from `hostname --ip-address`, which prints IPv6 and several addresses in any order (ray#35711), and never used to
find out which node is the head (ray#58875): the role comes from the scheduler's rank.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from atlasrl.errors import Fault

HOSTS = Path("/etc/hosts")
INTERFACES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def of_interface(nic: str, node: str) -> str:
    """The IPv4 address of a network interface of this host.

    Raises:
        Fault: no such interface, no IPv4 address on it, or loopback; the message names the node and what there is.
    """
    names = {name for _, name in socket.if_nameindex()}
    if nic not in names:
        raise Fault(f"{node}: no network interface {nic}; it has {', '.join(sorted(names))}; set nic in the site file")
    address = _ipv4(nic)
    if address is None:
        raise Fault(
            f"{node}: interface {nic} has no IPv4 address, which Ray and HCCL need; "
            f"`ip -4 addr show dev {nic}` must show one, or set another nic in the site file"
        )
    return not_loopback(address, node, f"interface {nic}")


def of_host(host: str, node: str, resolve: Callable[[str], list[str]] | None = None) -> str:
    """The IPv4 address that a host name stands for, as this node resolves it.

    Raises:
        Fault: the name does not resolve to IPv4, or to loopback; the message names the line of /etc/hosts.
    """
    try:
        found = (resolve or _resolve)(host)
    except OSError as problem:
        raise Fault(f"{node}: host name {host} does not resolve ({problem}); add it to /etc/hosts or set nic") from None
    return pick(found, node, f"host name {host}")


def pick(candidates: list[str], node: str, origin: str) -> str:
    """The first IPv4 address that is not loopback out of a mixed list such as ["fe80::1", "127.0.1.1", "10.0.0.3"].

    Raises:
        Fault: none is there.
    """
    parsed = [ipaddress.ip_address(text.partition("%")[0]) for text in candidates]
    usable = [address for address in parsed if address.version == 4 and not address.is_loopback]
    if usable:
        return str(usable[0])
    loopback = [address for address in parsed if address.version == 4]
    if loopback:
        return not_loopback(str(loopback[0]), node, origin)
    raise Fault(
        f"{node}: {origin} has only IPv6 addresses ({', '.join(map(str, parsed)) or 'none'}); Ray and HCCL need IPv4: "
        "set nic in the site file to an interface that has one"
    )


def not_loopback(address: str, node: str, origin: str, hosts: Path | None = None) -> str:
    """Return the address, or say which line of /etc/hosts makes it loopback.

    Raises:
        Fault: the address is loopback, so other nodes would talk to themselves.
    """
    if not ipaddress.ip_address(address).is_loopback:
        return address
    line = hosts_line(address, origin.rpartition(" ")[2], hosts or HOSTS)
    cause = f" because of {line}; remove that name from the line" if line else ""
    raise Fault(
        f"{node}: {origin} gives {address}, which other nodes cannot reach{cause}, or set nic in the site file to the "
        "interface that the nodes share"
    )


def hosts_line(address: str, name: str, hosts: Path) -> str | None:
    """The line of a hosts file that maps `name` to `address`, as "/etc/hosts:2 `127.0.1.1 node01`"."""
    try:
        lines = hosts.read_text().splitlines()
    except OSError:
        return None
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if fields[:1] == [address] and name in fields[1:]:
            return f"{hosts}:{number} `{' '.join(fields)}`"
    return None


def environment(address: str, nic: str | None) -> dict[str, str]:
    """The variables by which Ray's workers, HCCL, GLOO, the tensor pipe and vLLM use one and the same interface."""
    variables = {"VLLM_HOST_IP": address, "HCCL_IF_IP": address}
    if nic:
        variables |= dict.fromkeys(INTERFACES, nic)
    return variables


def _ipv4(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _resolve(host: str) -> list[str]:
    return [entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
