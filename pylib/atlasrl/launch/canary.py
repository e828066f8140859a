"""What every node must see before a job starts on it: the run, the interpreter, the inputs.

A log folder that is not shared makes Slurm fail without a word, and a run directory that each node has for itself makes
checkpoints that nobody can load.
"""

from __future__ import annotations

import re
from pathlib import Path

from atlasrl import plan as plans
from atlasrl.errors import UsageFault
from atlasrl.plan import Plan

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/proc", "/sys")
NODE_LOCAL_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs", "squashfs"}

# Runs once on every node before anything else, without Python and without the shared folder.
CANARY = r"""
fail() { echo "error: ${SLURMD_NODENAME:-$(hostname)}: $1" >&2; exit 1; }
folder=$1 token=$2 python=$3; shift 3
[ -d "$folder" ] || fail "does not see $folder; mount the shared filesystem there, or exclude the node"
[ -e "$folder/canary-$token" ] || fail "$folder is another folder there than at the submission; compare its mounts"
[ -x "$python" ] || fail "has no $python; the environment must lie on the shared filesystem or be set up on each node"
for path in "$@"; do [ -e "$path" ] || fail "does not see $path, which the site or the recipe needs"; done
""".strip()


def place(folder: Path, token: str) -> None:
    """Make the folder with the file by which nodes recognise it; one per submission, since an older job may wait."""
    folder.mkdir(exist_ok=True)
    (folder / f"canary-{token}").touch()


def refuse_node_local(path: Path, mounts: Path = Path("/proc/mounts")) -> None:
    """Refuse a run directory that other nodes cannot see.

    Raises:
        UsageFault: it lies in a folder or on a filesystem that each node has for itself.
    """
    path = path.resolve()
    if "%" in str(path):
        raise UsageFault(f"run directory {path} has a %, which Slurm replaces in file names; use another folder")
    local = next((folder for folder in NODE_LOCAL if path.is_relative_to(folder)), None)
    kind = _filesystem(path, mounts)
    if local is None and kind not in NODE_LOCAL_FILESYSTEMS:
        return
    where = f"in {local}" if local else f"on a {kind}"
    raise UsageFault(
        f"run directory {path} lies {where}, which each node has for itself; "
        "set `runs:` in the site file to a folder on the shared filesystem"
    )


def _filesystem(path: Path, mounts: Path) -> str | None:
    """Type of the filesystem that holds `path`: of the longest mount point above it, the last one mounted there."""
    best, kind = -1, None
    for line in mounts.read_text().splitlines():
        _, point, found, *_ = line.split()
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), point)  # \040 is a blank
        if path.is_relative_to(point) and len(Path(point).parts) >= best:
            best, kind = len(Path(point).parts), found
    return kind


def needed_by(plan: Plan) -> list[Path]:
    """Paths outside the run that every node must see."""
    recipe = plan.recipe
    inputs = [recipe.model.path, recipe.data.train, recipe.data.val, recipe.data.reward]
    return [plans.ROOT, *(path for path in inputs if path), *plan.site.shared]
