"""Carry out a repair so that a crash leaves the old checkpoint or the new one, and so that it can be undone.

When only the index or only the config changes, one rename does it. Else the repaired folder is built beside the old
one (files that stay are hard links) and the two folders are exchanged by one system call. The old folder becomes the
backup.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from ckpt_tools.checksum import PIECE, pieces, read_checksums, write_checksums
from ckpt_tools.errors import Fault, UsageFault
from ckpt_tools.files import (
    STATE_FOLDER,
    check_room,
    copy_file,
    exclusive,
    replacing,
    sync_folder,
    write_all,
    write_atomically,
    write_json,
)
from ckpt_tools.header import parse_json
from ckpt_tools.repair_plan import RepairPlan, ShardEdit
from ckpt_tools.verify import verify

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
BACKUPS = "backups"


def repair(plan: RepairPlan, target: Path | None = None) -> Path | None:
    """Carry out a plan, in place or into a new folder.

    Returns:
        the backup folder of a repair in place; None when a new folder was written or nothing had to change.

    Raises:
        UsageFault: the target exists.
        Fault: no room, or the file system cannot exchange folders (then give a target).
    """
    if target is not None:
        _repair_into(plan, target)
        return None
    if not plan.changes:
        return None
    with exclusive(plan.folder):
        _settle(plan.folder.resolve())
        if not plan.moves_shards and len(plan.texts) == 1:
            return _replace_one_file(plan)
        return _exchange_folders(plan)


def _repair_into(plan: RepairPlan, target: Path) -> None:
    if target.exists():
        raise UsageFault(f"{target}: exists; give a folder that does not")
    built = _build(plan, target.parent, f".{target.name}.new-")
    built.rename(target)
    sync_folder(target.parent)


def _next_backup(folder: Path) -> Path:
    parent = folder / STATE_FOLDER / BACKUPS
    parent.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name) for path in parent.iterdir() if path.name.isdigit()]
    return parent / f"{max(numbers, default=0) + 1:04d}"


def _note(plan: RepairPlan, kind: str, **more) -> dict:
    return {"kind": kind, "time": round(time.time()), "changes": list(plan.changes), **more}


def _replace_one_file(plan: RepairPlan) -> Path:
    """Back the file up, then rename the new one over it."""
    ((name, text),) = plan.texts.items()
    path, backup = plan.folder / name, _next_backup(plan.folder)
    backup.mkdir()
    existed = path.exists()
    if existed:
        copy_file(path, backup / name)
    write_json(backup / "changes.json", _note(plan, "file", file=name, existed=existed))
    sync_folder(backup.parent)
    write_atomically(path, text)
    return backup


def _exchange_folders(plan: RepairPlan) -> Path:
    """Build the repaired folder beside the old one, swap them, keep the old one as the backup."""
    folder = plan.folder.resolve()
    check_room(folder, plan.written_bytes)
    built = _build(plan, folder.parent, f".{folder.name}.repair-")
    backup_name = _next_backup(folder).name
    state = built / STATE_FOLDER / BACKUPS
    state.mkdir(parents=True)
    write_json(state / f"{backup_name}.json", _note(plan, "folder", beside=built.name, files=_names(built)))
    try:
        exchange(folder, built)
    except BaseException:
        shutil.rmtree(built)
        raise
    return _adopt(folder, built, backup_name)


def _names(folder: Path) -> list[str]:
    """Top-level names of a checkpoint folder, our notes left out."""
    return sorted(path.name for path in folder.iterdir() if path.name != STATE_FOLDER)


def _adopt(folder: Path, old: Path, number: str) -> Path:
    """Move the old folder, now beside, to its place among the backups; older backups move up into the new folder."""
    backups = folder / STATE_FOLDER / BACKUPS
    earlier = old / STATE_FOLDER / BACKUPS
    if earlier.is_dir():
        for path in sorted(earlier.iterdir()):
            path.rename(backups / path.name)
    old.rename(backups / number)
    sync_folder(backups)
    sync_folder(folder.parent)
    return backups / number


def exchange(one: Path, other: Path) -> None:
    """Swap two folders by one system call (renameat2 with RENAME_EXCHANGE): no moment without either.

    Raises:
        Fault: the file system cannot (NFS, some parallel file systems), or a folder is a mount point.
    """
    library = ctypes.CDLL(None, use_errno=True)
    call = getattr(library, "renameat2", None)
    code = -1
    if call is not None:
        code = call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if code != 0:
        number = ctypes.get_errno() if call is not None else errno.ENOSYS
        raise Fault(
            f"{one}: this file system cannot exchange two folders at once ({os.strerror(number)}), and anything else "
            "could leave a half-repaired checkpoint; give --target NEWFOLDER beside it, nothing was changed"
        )
    sync_folder(one.parent)


def _build(plan: RepairPlan, parent: Path, prefix: str) -> Path:
    """Write the repaired checkpoint into a new hidden folder; what stays is linked, not copied.

    Raises:
        Fault: the folder built does not verify better than the plan promised.
    """
    built = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    try:
        built.chmod(plan.folder.stat().st_mode & 0o7777)
        for edit in plan.shards:
            if edit.header is None:
                _link(edit.source.path, built / edit.file)
            else:
                _write_shard(edit, built / edit.file)
        taken = {edit.source.path.name for edit in plan.shards} | set(plan.removed) | set(plan.texts)
        _link_rest(plan.folder, built, taken)
        for name, text in plan.texts.items():
            write_atomically(built / name, text)
        _carry_checksums(plan, built)
        errors = {(finding.kind, finding.where) for finding in verify(built).errors}
        if new := errors - {(finding.kind, finding.where) for finding in plan.remaining.errors}:
            raise Fault(f"{plan.folder}: the repaired checkpoint would have {sorted(new)[0]}; nothing was changed")
        sync_folder(built)
    except BaseException:
        shutil.rmtree(built, ignore_errors=True)
        raise
    return built


def _link(source: Path, target: Path) -> None:
    """Take a file over without copying its data where the file system allows."""
    real = source.resolve()
    if source.is_symlink():
        target.symlink_to(real)
        return
    try:
        os.link(real, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        copy_file(real, target)


def _link_rest(folder: Path, built: Path, taken: set[str]) -> None:
    """Take over everything else: tokenizer, code, sub-folders; not our own notes."""
    for path in folder.iterdir():
        if path.name == STATE_FOLDER or path.name in taken:
            continue
        if path.is_dir() and not path.is_symlink():
            (built / path.name).mkdir()
            _link_rest(path, built / path.name, set())
        else:
            _link(path, built / path.name)


def _write_shard(edit: ShardEdit, path: Path) -> None:
    buffer = np.empty(PIECE, np.uint8)
    with edit.source.path.open("rb", buffering=0) as file, replacing(path) as out:
        write_all(out, edit.header)
        for tensor in edit.tensors:
            begin = edit.source.data_start + tensor.begin
            for piece in pieces(file.fileno(), begin, begin + tensor.nbytes, buffer, edit.source.path):
                write_all(out, piece)


def _carry_checksums(plan: RepairPlan, built: Path) -> None:
    """Checksums depend on data only, so those of kept tensors stay true."""
    if checksums := read_checksums(plan.folder):
        kept = {tensor.name for edit in plan.shards for tensor in edit.tensors}
        write_checksums(built, {name: value for name, value in checksums.items() if name in kept})


def undo(folder: Path) -> list[str]:
    """Take the newest repair back, byte for byte.

    Returns:
        the changes that were undone.

    Raises:
        UsageFault: there is no repair to undo.
    """
    folder = folder.resolve()
    with exclusive(folder):
        backups = folder / STATE_FOLDER / BACKUPS
        _settle(folder)
        numbers = sorted(path.name for path in backups.iterdir() if path.is_dir()) if backups.is_dir() else []
        if not numbers:
            raise UsageFault(f"{folder}: no repair to undo; there is no backup in {backups}")
        newest = backups / numbers[-1]
        note = _read_note(newest / "changes.json") or _read_note(backups / f"{newest.name}.json")
        if note.get("kind") == "file":
            _undo_file(folder, newest, note)
        elif note.get("kind") == "folder":
            _undo_folder(folder, newest, note)
        else:
            raise Fault(f"{newest}: has no readable change list; copy its files back by hand, nothing was changed")
        return [str(change) for change in note.get("changes", [])]


def _read_note(path: Path) -> dict:
    try:
        note, _ = parse_json(path.read_bytes(), "change list")
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _settle(folder: Path) -> None:
    """Finish what a crash left right after an exchange, or right before the one of an undo."""
    backups = folder / STATE_FOLDER / BACKUPS
    for path in sorted(backups.glob("*.json")) if backups.is_dir() else []:
        if (backups / path.stem).exists():
            continue
        beside = folder.parent / Path(str(_read_note(path).get("beside") or "none")).name
        if beside.name.startswith(f".{folder.name}.repair-") and beside.is_dir():
            _adopt(folder, beside, path.stem)
        elif (beside := _undo_place(folder, path.stem)).is_dir():
            beside.rename(backups / path.stem)
    for beside in sorted(folder.parent.glob(_undo_place(folder, "*").name)):
        number = beside.name.rpartition("-")[2]
        if not (backups / f"{number}.json").exists():  # the restored folder is in place, this is the repaired one
            _discard_repaired(folder, beside, number)
    for unfinished in folder.parent.glob(f".{folder.name}.repair-*"):
        shutil.rmtree(unfinished)


def _undo_place(folder: Path, number: str) -> Path:
    return folder.parent / f".{folder.name}.undo-{number}"


def _undo_file(folder: Path, backup: Path, note: dict) -> None:
    path = folder / Path(str(note["file"])).name
    if note.get("existed"):
        copy_file(backup / path.name, path)
    else:
        path.unlink(missing_ok=True)
    shutil.rmtree(backup)


def _undo_folder(folder: Path, backup: Path, note: dict) -> None:
    """Swap the backup in; the repaired version goes, since all of it was written or linked by the repair."""
    if foreign := sorted(set(_names(folder)) - set(note.get("files", []))):
        raise UsageFault(f"{folder}: {foreign[0]} came after the repair and would be lost; move it away first")
    beside = _undo_place(folder, backup.name)
    backup.rename(beside)
    try:
        exchange(folder, beside)
    except BaseException:
        beside.rename(backup)
        raise
    _discard_repaired(folder, beside, backup.name)


def _discard_repaired(folder: Path, repaired: Path, number: str) -> None:
    """Hand the older backups down to the restored folder and remove the repaired one."""
    earlier = folder / STATE_FOLDER / BACKUPS
    earlier.mkdir(parents=True, exist_ok=True)
    inherited = repaired / STATE_FOLDER / BACKUPS
    for path in sorted(inherited.iterdir()) if inherited.is_dir() else []:
        if path.stem != number:
            path.rename(earlier / path.name)
    shutil.rmtree(repaired)
    sync_folder(folder.parent)
