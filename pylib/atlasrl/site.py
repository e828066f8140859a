"""The site: which cluster. A YAML file per cluster, checked against this schema before anything starts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from atlasrl import schema
from atlasrl.schema import PathLike, Section, Text

SITES = Path(__file__).resolve().parents[2] / "jobs" / "sites"

_TIME = re.compile(
    r"(?P<days>\d+)-(?P<hours>\d{1,2})(?::(?P<minutes>\d{1,2})(?::(?P<seconds>\d{1,2}))?)?"
    r"|(?P<plain>\d+(?::\d{1,2}){0,2})"
)


def minutes_of(time: str) -> int:
    """Minutes of a Slurm time limit, rounded up as Slurm does.

    The forms of `sbatch --time`: M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.

    Raises:
        ValueError: none of these forms, or no time at all.
    """
    match = _TIME.fullmatch(time)
    if match is None:
        raise ValueError(
            f"{time!r} is no Slurm time; write minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
            "days-hours:minutes or days-hours:minutes:seconds"
        )
    if match["plain"]:
        numbers = [int(number) for number in match["plain"].split(":")]
        days, hours, minutes, seconds = (0, *numbers) if len(numbers) == 3 else (0, 0, *numbers, 0)[:4]
    else:
        days, hours, minutes, seconds = (int(match[key] or 0) for key in ("days", "hours", "minutes", "seconds"))
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise ValueError("a time limit of zero means no limit to Slurm; write the time the job may take")
    return -(-total // 60)


def _checked_time(value: str) -> str:
    minutes_of(value)
    return value


def _one_line(value: str) -> str:
    if any(ord(character) < 32 for character in value):
        raise ValueError("a value that reaches the batch script must be one line without control characters")
    return value


def _sbatch_line(value: str) -> str:
    if not re.fullmatch(r"--[a-z][a-z0-9-]*(=.*)?", value):
        raise ValueError(f"{value!r} is no sbatch option; write it as on the command line, for example --mem=0")
    return value


Word = Annotated[Text, AfterValidator(_one_line)]
Time = Annotated[Text, AfterValidator(_checked_time)]
SbatchLine = Annotated[Text, AfterValidator(_one_line), AfterValidator(_sbatch_line)]


class Slurm(Section):
    """What a batch job of this cluster must ask for."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    time: Time = Field("1-00:00:00", description="limit of one job, in any form of `sbatch --time`")
    constraint: Word | None = None
    exclude: Word | None = Field(None, description="nodes not to use, as a Slurm host list")
    reservation: Word | None = None
    gres: Word | None = Field(None, description="per node, for example npu:8; absent: whole nodes")
    exclusive: bool = Field(True, description="no other job on our nodes")
    cpus_per_node: PositiveInt | None = None
    memory: Word | None = Field(None, description="per node, for example 900G; 0: all of it")
    wckey: Word | None = Field(None, description="only where the cluster checks wckeys")
    extra: list[SbatchLine] = Field([], description="more sbatch options, for example --switches=1")


class Ssh(Section):
    """Hosts without a scheduler, the head first. Log-in by key, without a question."""

    hosts: list[Word] = Field(min_length=1)
    user: Word | None = None
    port: PositiveInt | None = None
    options: list[Word] = Field([], description="more options of ssh, for example -oProxyJump=gate")


class RayLimits(Section):
    """How Ray starts. The deadline grows with the number of nodes, since Python is read from a shared disk."""

    deadline: PositiveFloat = Field(120, description="seconds until one node must have joined")
    deadline_per_node: PositiveFloat = Field(5, description="more seconds for each further node")
    join_window: NonNegativeInt | None = Field(
        None, description="nodes that may join at the same time; 0: all; absent: all, on a shared host cores + 1"
    )
    object_store_mb: PositiveInt | None = Field(None, description="per node; absent: Ray's own choice")


class Life(Section):
    """When a job starts again by itself, and when it stops asking."""

    fruitless_attempts: PositiveInt = Field(3, description="attempts without a new checkpoint before the run stops")
    restart_in_place: bool = Field(True, description="start again in the same allocation when all nodes are healthy")
    save_minutes: PositiveFloat | None = Field(
        None, description="lead time before a planned end; absent: 1.5 times the longest step and save, at least 5"
    )


class Site(Section):
    """One cluster."""

    description: str = ""
    kind: Literal["local", "slurm", "ssh"] = "local"
    nic: Word | None = Field(None, description="network interface of Ray, HCCL, GLOO, vLLM; absent: by the host name")
    one_host: bool = Field(
        False, description="slurm: all nodes are daemons on this machine; each gets a loopback address"
    )
    runs: PathLike | None = Field(None, description="where runs are made, seen by every node; absent: ./runs")
    shared: list[PathLike] = Field([], description="further folders that every node must see")
    scratch: PathLike = Field(Path("/tmp"), description="local disk of a node; Ray's temporary files; a short path")
    python: PathLike | None = Field(None, description="interpreter on the nodes; absent: the submitting one")
    setup: list[Word] = Field([], description="shell lines that each node runs first, for example `source set_env.sh`")
    environment: dict[str, Text] = Field({}, description="extra environment variables of every process of the job")
    slurm: Slurm = Slurm()
    ssh: Ssh | None = None
    ray: RayLimits = RayLimits()
    life: Life = Life()

    @property
    def shares_host(self) -> bool:
        """Whether the nodes share a machine, so that each needs ports and an address of its own there."""
        return self.kind == "local" or self.one_host

    @property
    def joining_at_once(self) -> int:
        """How many nodes may start their Ray at the same time, 0: all; hosts of their own do not hinder each other."""
        if self.ray.join_window is not None:
            return self.ray.join_window
        return len(os.sched_getaffinity(0)) + 1 if self.shares_host else 0

    @model_validator(mode="after")
    def _has_its_section(self) -> Site:
        for kind, absent in (("slurm", Slurm()), ("ssh", None)):
            if self.kind != kind and getattr(self, kind) != absent:
                raise ValueError(f"section {kind} stands in a site of kind {self.kind}; write kind: {kind}")
        if self.kind == "ssh" and self.ssh is None:
            raise ValueError("a site of kind ssh needs its hosts, for example `ssh: {hosts: [node01, node02]}`")
        return self


def load(name_or_file: str, changes: list[str] | None = None) -> Site:
    """Read a site by name (from jobs/sites) or by path and apply `key=value` changes.

    Raises:
        UsageFault: no such site, not YAML, unknown key (the nearest known key is named), or wrong type.
    """
    return schema.load(Site, schema.find("site", SITES, name_or_file), changes)


def parse(tree: dict, origin: str) -> Site:
    """Check a tree, such as the `site` of a plan.json, against the schema. Raises UsageFault."""
    return schema.parse(Site, tree, origin)
