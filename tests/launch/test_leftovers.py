"""What an earlier attempt left on a node is removed, and nothing else is."""

import subprocess
import sys

from atlasrl import raycluster


def test_only_folders_that_nobody_uses_are_swept(tmp_path):
    left, used, elsewhere, link = (tmp_path / name for name in ("left", "used", "elsewhere", "link"))
    for folder in (left, used, elsewhere):
        (folder / "0" / "session").mkdir(parents=True)
    link.symlink_to(elsewhere)
    raylet = subprocess.Popen([sys.executable, "-c", "input()", f"--temp-dir={used}/0"], stdin=subprocess.PIPE)
    try:
        raycluster.sweep([left, used, link, tmp_path / "never-made"])
        assert not left.exists()
        assert (used / "0" / "session").exists()
        assert link.is_symlink() and (elsewhere / "0" / "session").exists()
    finally:
        raylet.communicate(b"\n")
    raycluster.sweep([used])
    assert not used.exists()
