"""How the supervisors of a job speak: small files in <run>/jobs/<job>.<restarts>-<token>/.

Job ids come back, so the token of the submission is part of the folder's name. `order.json` is rank 0's last word,
`task<k>.json` that of rank k, `sign.json` shows that rank 0 lives.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from atlasrl.rundir import write_atomically

POLL_SECONDS = 0.2
REPORT_SECONDS = 60  # from the end of rank 0's node process to those of the others: they end their Ray first
LEAD_LOST_SECONDS = 120  # without a sign of rank 0 the others leave; Slurm would end them, bare hosts would not
SIGN_SECONDS = 5


class Meeting:
    """One rank's place at the table.

    Args:
        folder: shared by all ranks.
        names: of the nodes, by rank.
    """

    def __init__(self, folder: Path, names: list[str], rank: int):
        self.folder, self.names, self.rank = folder, names, rank
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sign, self._sign_seen, self._next_sign = None, time.monotonic(), 0.0

    @property
    def name(self) -> str:
        """This node's name, by the scheduler's word."""
        return self.names[self.rank]

    # --- rank 0 ---

    def order(self, **words) -> None:
        write_atomically(self.folder / "order.json", json.dumps(words) + "\n")

    def heard_of(self, rank: int) -> dict:
        """The last word of a rank."""
        return read(self.folder / f"task{rank}.json") or {"state": "silent", "attempt": None}

    def silent(self, state: str, attempt: int) -> list[str]:
        """Names of the nodes, other than rank 0's, whose last word is not this state of an attempt."""
        heard = {rank: self.heard_of(rank) for rank in range(1, len(self.names))}
        return [
            self.names[rank] for rank, words in heard.items() if (words["state"], words["attempt"]) != (state, attempt)
        ]

    def give_sign(self) -> None:
        """Show the others that rank 0 lives. Clocks of different hosts are never compared."""
        if time.monotonic() > self._next_sign:
            self._next_sign = time.monotonic() + SIGN_SECONDS
            with contextlib.suppress(OSError):  # the disk may be full for a while
                write_atomically(self.folder / "sign.json", json.dumps({"sign": time.monotonic_ns()}) + "\n")

    # --- the others ---

    def ordered(self) -> dict | None:
        """Rank 0's last word."""
        return read(self.folder / "order.json")

    def report(self, state: str, attempt: int, **words) -> None:
        """Tell rank 0; while the disk is full, again until it has made room."""
        text = json.dumps({"state": state, "attempt": attempt, **words}) + "\n"
        limit = time.monotonic() + REPORT_SECONDS
        while True:
            try:
                return write_atomically(self.folder / f"task{self.rank}.json", text)
            except OSError:
                if time.monotonic() > limit:
                    raise
                time.sleep(POLL_SECONDS)

    def lead_is_lost(self) -> bool:
        """Whether rank 0 has been silent for too long."""
        sign = read(self.folder / "sign.json")
        if sign != self._sign:
            self._sign, self._sign_seen = sign, time.monotonic()
        return time.monotonic() - self._sign_seen > LEAD_LOST_SECONDS


def read(path: Path) -> dict | None:
    """A small JSON file that another node writes; None while it is not there."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    with contextlib.suppress(OSError):
        list(path.parent.iterdir())  # an NFS client remembers for a while that a file was absent; this makes it look
    return None
