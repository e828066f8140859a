"""Real ssh servers on the nodes of the test cluster, with keys of their own."""

from __future__ import annotations

import subprocess

from cluster import Cluster

CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/client_key.pub
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
"""


def start(cluster: Cluster) -> list[str]:
    """Start an ssh server on every node; returns the ssh options by which the login machine reaches them."""
    folder = cluster.folder / "ssh"
    if not folder.exists():
        folder.mkdir(mode=0o700)
        for name in ("host_key", "client_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        (folder / "sshd_config").write_text(CONFIG.format(folder=folder))
    for node in cluster.nodes:
        if cluster.on(node, "pgrep", "-x", "sshd", check=False).returncode:
            cluster.on(node, "/usr/sbin/sshd", "-f", folder / "sshd_config")
    trust = ["-oStrictHostKeyChecking=accept-new", f"-oUserKnownHostsFile={folder}/known_hosts"]
    return ["-F/dev/null", f"-i{folder}/client_key", *trust]
