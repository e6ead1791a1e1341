"""Remains of a folder after a loss of power, at every step of a program that changes it.

Files survive with the content of their last sync, names with that of their folder. A file system may also have
written names on its own account, of one folder and not of another, never the content of a file that it was not asked
for: three disks are made at each step, the one with nothing but what was synced, the one with all names, and one with
the names of some folders.
"""

import os
import random
from pathlib import Path

CHANGES = ("fsync", "rename", "unlink", "rmdir", "mkdir")


class Disk:
    """Watches the changes to `root` while it is used as a context, and calls `look(disk, step)` before each.

    root: an existing folder, empty. It is durable itself.
    """

    def __init__(self, root, *, look):
        self._root = root
        self._look = look
        self._looking = False
        self._steps = 0
        self._kept = {}  # inode -> a descriptor, so that no other file gets its number
        self._content = {}  # inode of a file -> its durable content
        self._names = {}  # inode of a folder -> {name: inode}
        self._pin(root)

    def __enter__(self):
        self._whole = {name: getattr(os, name) for name in CHANGES}
        for name in CHANGES:
            setattr(os, name, self._watched(name))
        return self

    def __exit__(self, *of):
        for name, whole in self._whole.items():
            setattr(os, name, whole)
        for descriptor in self._kept.values():
            os.close(descriptor)

    def step(self):
        """A step of the program; after it the power may fail."""
        if not self._looking:
            self._looking = True
            self._steps += 1
            try:
                self._look(self, self._steps)
            finally:
                self._looking = False

    def left_overs(self, target):
        """Folders, made in `target`, that may be left of the root now."""
        draw = random.Random(self._steps)
        for kind, ahead in (("synced", lambda: False), ("names", lambda: True), ("some", lambda: draw.random() < 0.5)):
            made = target / f"{self._steps}-{kind}"
            self._make(made, self._root.stat().st_ino, ahead)
            yield made

    # ---- inside

    def _watched(self, name):
        def call(*args, **of):
            if self._looking:
                return self._whole[name](*args, **of)
            self.step()
            done = self._whole[name](*args, **of)
            if name == "fsync":
                self._synced(args[0])
            return done

        return call

    def _synced(self, descriptor):
        inode = os.fstat(descriptor).st_ino
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_relative_to(self._root):
            return
        self._pin(path)
        if path.is_dir():
            self._names[inode] = {child.name: self._pin(child) for child in path.iterdir()}
        else:
            self._content[inode] = path.read_bytes()

    def _pin(self, path):
        inode = path.stat().st_ino
        if inode not in self._kept:
            self._kept[inode] = os.open(path, os.O_RDONLY)
        return inode

    def _now(self, inode):
        return {path.name: self._pin(path) for path in self._path(inode).iterdir()}

    def _path(self, inode):
        """A path that can be read under any name of the inode, and without one."""
        return Path(f"/proc/self/fd/{self._kept[inode]}")

    def _make(self, path, inode, ahead):
        if not self._path(inode).is_dir():
            path.write_bytes(self._content.get(inode, b""))
            return
        path.mkdir()
        names = self._now(inode) if ahead() else self._names.get(inode, {})
        for name, child in names.items():
            self._make(path / name, child, ahead)
