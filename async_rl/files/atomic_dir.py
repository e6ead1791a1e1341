"""Files and folders that appear complete or not at all, even if the writing process or the machine dies.

What is removed or renamed away is so on the disk before what it stood for goes: a file system may do the one without
the other. A file that was synced before is clean, and to sync it once more writes nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

PARTIAL, REPLACED = ".partial", ".replaced"


def make_folder(folder: Path) -> None:
    """Make it and the folders that it is in, if they are missing; their names survive a loss of power."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Return once the content of a file, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """Yield a path to write to; the file there then replaces `path`, also if other processes do the same."""
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def partial_folder(final: Path) -> Path:
    """Folder for the content of `final` until `publish_folder`."""
    return final.with_name(final.name + PARTIAL)


def publish_folder(final: Path) -> None:
    """Make `partial_folder(final)` durable and move it to `final`; one that is there goes.

    Wherever this is cut short, by a kill, an OSError or a loss of power, `recover_folder` leaves the old content or the
    new, whole. Once it returned, it is the new.
    """
    partial, replaced = partial_folder(final), final.with_name(final.name + REPLACED)
    _sync_tree(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_path(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def recover_folder(final: Path) -> None:
    """Put `final` in order after a kill: incomplete content is removed, and an interrupted replacement is undone."""
    replaced = final.with_name(final.name + REPLACED)
    if replaced.exists():
        if final.exists():
            sync_path(final.parent)
            shutil.rmtree(replaced)
        else:
            replaced.rename(final)
    if partial_folder(final).exists():
        shutil.rmtree(partial_folder(final))


def recover_folders(parent: Path) -> None:
    """`recover_folder` for every folder in `parent`."""
    if parent.is_dir():
        for left in [*parent.glob(f"*{PARTIAL}"), *parent.glob(f"*{REPLACED}")]:
            recover_folder(left.with_suffix(""))


def remove_folder(final: Path) -> None:
    """Remove `final`; cut short, it is not a folder with half its content that stays."""
    removed = partial_folder(final)
    final.rename(removed)
    sync_path(final.parent)
    shutil.rmtree(removed)


def _sync_tree(folder: Path) -> None:
    """Return once the files of `folder` and their names survive a loss of power."""
    for path in (*folder.rglob("*"), folder):
        sync_path(path)
