"""The batch script is a pure function of site and run: exact texts, and the traps it avoids.

After a wanted change: `ATLASRL_WRITE_GOLDEN=1 pytest tests/launch/test_sbatch.py`, then read the difference.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from atlasrl import site as sites
from atlasrl.errors import UsageFault
from atlasrl.launch import canary as canary_text
from atlasrl.launch import slurm

GOLDEN = Path(__file__).parent / "golden"
FOLDER = Path("/shared/runs/first run/slurm")
PYTHON = Path("/shared/atlasrl/env/python")

MINIMAL = []
FULL = [
    "slurm.partition=npu",
    "slurm.account=dsv3",
    "slurm.qos=long",
    "slurm.time=2-12:30",
    "slurm.constraint=a2&roce",
    "slurm.exclude=node[07,31]",
    "slurm.reservation=rl",
    "slurm.gres=npu:8",
    "slurm.exclusive=false",
    "slurm.cpus_per_node=192",
    "slurm.memory=0",
    "slurm.wckey=rl",
    "slurm.extra=[--contiguous, --mail-type=END]",
]


def text(*changes: str, nodes: int = 32, lead: int = 600, needed=(Path("/shared/it's a model"),)) -> str:
    site = sites.parse({"kind": "slurm"}, "test") if not changes else sites.load("slurm", list(changes))
    chosen = slurm.parameters(
        site,
        nodes=nodes,
        name="first",
        python=PYTHON,
        folder=FOLDER,
        token="t0k3n",
        lead_seconds=lead,
        needed=[*needed],
        pythonpath="/shared/atlasrl/pylib",
    )
    return slurm.batch_text(chosen, python=PYTHON, folder=FOLDER)


@pytest.mark.parametrize(("name", "changes"), [("minimal", MINIMAL), ("full", FULL)])
def test_the_text_is_exactly_this(name, changes):
    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("ATLASRL_WRITE_GOLDEN"):
        golden.write_text(text(*changes))
    assert text(*changes) == golden.read_text()


@pytest.mark.parametrize("changes", [MINIMAL, FULL])
def test_bash_reads_the_script(changes):
    subprocess.run(["bash", "-n"], input=text(*changes), text=True, check=True)


def test_no_wckey_unless_asked():
    assert "wckey" not in text()
    assert "#SBATCH --wckey=rl\n" in text(*FULL)


def test_a_dead_task_ends_the_step_and_the_warning_comes_early_enough():
    main = text().rstrip().splitlines()[-1]
    assert main.startswith("srun ") and "--kill-on-bad-exit=1" in main
    assert "#SBATCH --signal=USR2@600\n" in text()
    assert "#SBATCH --requeue\n" in text()


@pytest.mark.parametrize("time", ["18", "0:18:00", "17:30"])
def test_a_time_limit_without_room_for_the_save_is_refused(time):
    with pytest.raises(UsageFault, match="too short: the job must save 10 min before its end"):
        text(f"slurm.time={time}")


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("90", 90), ("1:30", 2), ("12:00:00", 720), ("1-0", 1440), ("1-2:03", 1563), ("1-2:03:04", 1564), ("0:0:1", 1)],
)
def test_every_form_of_a_slurm_time(time, minutes):
    assert sites.minutes_of(time) == minutes
    assert sites.load("slurm", [f"slurm.time={time}"]).slurm.time == time, "YAML must not read it as a number"


@pytest.mark.parametrize("time", ["0", "1:2:3:4", "1-", "-5", "1h", "", "00:00", "UNLIMITED"])
def test_other_times_are_refused(time):
    with pytest.raises(ValueError):
        sites.minutes_of(time)


@pytest.mark.parametrize(
    "change", ["slurm.partition='a\nb'", "slurm.extra=['--mem=1\n#SBATCH --qos=x']", "slurm.extra=[mem=0]"]
)
def test_nothing_breaks_out_of_its_line(change):
    key, _, value = change.partition("=")
    with pytest.raises(UsageFault):
        sites.load("slurm", [f"{key}={value}".replace("\n", "\\n").replace("'", '"')])


def test_hostile_words_stay_words():
    """Everything from the site reaches Slurm as one word: the shell that reads the script must not run it."""
    evil = "$(touch /tmp/owned);`id`'\""
    script = text(f"slurm.partition={evil!r}".replace("\\'", "''"), needed=(Path(f"/shared/{evil}"),))
    directive = next(line for line in script.splitlines() if line.startswith("#SBATCH --partition"))
    shown = subprocess.run(
        ["bash", "-c", f"printf %s {directive.partition('=')[2]}"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == evil


@pytest.fixture
def canary(tmp_path):
    """Run the canary as a node would, with a run folder that holds the token."""
    (tmp_path / "canary-t0k3n").touch()

    def run(folder=tmp_path, token="t0k3n", python="/bin/sh", *needed):
        words = ["bash", "-c", canary_text.CANARY, "canary", str(folder), token, python, *needed]
        return subprocess.run(
            words, env={**os.environ, "SLURMD_NODENAME": "node07"}, capture_output=True, text=True, check=False
        )

    return run


def test_the_canary_passes_a_good_node(canary, tmp_path):
    assert canary(tmp_path, "t0k3n", "/bin/sh", str(tmp_path), "/bin").returncode == 0


def test_the_canary_names_the_node_and_what_it_lacks(canary, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "canary-older").touch()
    for result, words in (
        (canary(tmp_path / "absent"), "does not see"),
        (canary(other), "is another folder there"),
        (canary(tmp_path, "t0k3n", "/no/python"), "has no /no/python"),
        (canary(tmp_path, "t0k3n", "/bin/sh", "/bin", "/no/model"), "does not see /no/model"),
    ):
        assert result.returncode == 1
        assert result.stderr.startswith("error: node07: ") and words in result.stderr


@pytest.mark.parametrize("path", ["/tmp/runs/x", "/dev/shm/x", "/var/tmp/x", "/run/x"])
def test_node_local_run_directories_are_refused(path):
    with pytest.raises(UsageFault, match="each node has for itself"):
        canary_text.refuse_node_local(Path(path))


def test_the_filesystem_decides_elsewhere(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda1 / ext4 rw 0 0\ntmpfs /fast\\040disk tmpfs rw 0 0\nnas:/x /fast\\040disk/nas nfs4 rw 0 0\n"
        "nas:/y /shared nfs4 rw 0 0\n"
    )
    canary_text.refuse_node_local(Path("/shared/runs/a"), mounts)
    canary_text.refuse_node_local(Path("/fast disk/nas/a"), mounts)
    with pytest.raises(UsageFault, match="on a tmpfs"):
        canary_text.refuse_node_local(Path("/fast disk/a"), mounts)


def test_a_percent_sign_in_the_path_is_refused():
    with pytest.raises(UsageFault, match="%"):
        canary_text.refuse_node_local(Path("/shared/100%/a"))


@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("sbatch") is None, reason="no Slurm on this machine")
def test_sbatch_knows_every_option(tmp_path):
    """Without a cluster sbatch still parses the directives and refuses unknown ones by name."""
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nGresTypes=npu\n"
    )
    script = tmp_path / "job.sh"
    script.write_text(text(*FULL))
    result = subprocess.run(
        ["sbatch", "--test-only", str(script)],
        env={**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert "unrecognized option" not in result.stderr and "invalid" not in result.stderr.lower(), result.stderr
