"""The configuration of the test cluster: as on a real one (same ports everywhere), but quick to react."""

from __future__ import annotations

from pathlib import Path

# munge, no cgroups, no affinity, faked hardware; each line was needed on Debian's Slurm 22.05 in a container or VM
COMMON = """
ClusterName=atlasrl
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/run/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=npu
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=10
InactiveLimit=0
Waittime=0
MinJobAge=600
MessageTimeout=30
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
JobRequeue=1
PropagateResourceLimits=NONE
JobCompType=jobcomp/none
"""
HARDWARE = "CPUs=16 RealMemory=4000 Gres=npu:8 State=UNKNOWN"


def write(
    folder: Path, nodes: list[str], *, controller: str, addresses: list[str], lines: list[str], user: str
) -> Path:
    """Write slurm.conf, gres.conf and cgroup.conf and return the first.

    Args:
        controller: value of SlurmctldHost.
        addresses: further words of each node's line.
        lines: further lines, for example of accounting or preemption.
    """
    text = COMMON.format(folder=folder, user=user) + f"SlurmctldHost={controller}\n"
    text += "".join(f"NodeName={name} {words} {HARDWARE}\n" for name, words in zip(nodes, addresses, strict=True))
    text += f"PartitionName=main Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO\n"
    (folder / "gres.conf").write_text("Name=npu Count=8 Flags=CountOnly\n")  # counted only: no device files needed
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # "autodetect" fails without /sys/fs/cgroup
    conf = folder / "slurm.conf"
    conf.write_text(text + "".join(f"{line}\n" for line in lines))
    return conf
