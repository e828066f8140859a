"""Which address a node gives to the others."""

import socket

import psutil
import pytest

from atlasrl.errors import Fault
from atlasrl.launch import addresses


def test_ipv6_and_several_addresses_give_the_first_usable_ipv4():
    mixed = ["fe80::1%eth0", "127.0.1.1", "10.0.0.3", "10.0.0.4"]
    assert addresses.pick(mixed, "node01", "host name node01") == "10.0.0.3"


def test_only_ipv6_is_a_fault_that_says_so():
    with pytest.raises(Fault, match=r"node01: .* only IPv6 addresses .*fe80::1"):
        addresses.pick(["fe80::1"], "node01", "host name node01")


def test_loopback_names_the_line_of_the_hosts_file(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n# 127.0.1.1 node01\n127.0.1.1\tnode01.site node01 # by the installer\n")
    with pytest.raises(Fault, match=r"node01: .* gives 127\.0\.1\.1.*hosts:3 `127.0.1.1 node01.site node01`"):
        addresses.not_loopback("127.0.1.1", "node01", "host name node01", hosts)


def test_a_loopback_host_name_is_refused_with_this_machines_hosts_file():
    with pytest.raises(Fault, match=r"cannot reach because of /etc/hosts:\d+ `.*localhost"):
        addresses.of_host("localhost", "node01")


def test_a_missing_interface_lists_those_that_exist():
    with pytest.raises(Fault, match=r"node07: no network interface enp1s0f9; it has .*lo"):
        addresses.of_interface("enp1s0f9", "node07")


def test_the_loopback_interface_is_refused():
    with pytest.raises(Fault, match=r"interface lo gives 127\.0\.0\.1"):
        addresses.of_interface("lo", "node07")


def test_a_real_interface_gives_its_ipv4():
    for nic, found in psutil.net_if_addrs().items():
        ipv4 = [each.address for each in found if each.family == socket.AF_INET]
        if ipv4 and nic != "lo":
            assert addresses.of_interface(nic, "here") in ipv4


def test_an_unknown_host_is_a_fault_not_a_traceback():
    def resolve(host):
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(Fault, match="node02: host name node99 does not resolve"):
        addresses.of_host("node99", "node02", resolve)


def test_all_variables_agree_with_the_one_setting():
    variables = addresses.environment("10.0.0.3", "eth0")
    assert {variables[name] for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")} == {"eth0"}
    assert {variables[name] for name in ("VLLM_HOST_IP", "HCCL_IF_IP")} == {"10.0.0.3"}
