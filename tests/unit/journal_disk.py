"""A disk in memory for tests: forgets what was not synced, runs full, fails and dies on demand."""

from __future__ import annotations

import errno

from message_queue.journal.disk import MAX_PARTS


class Crash(BaseException):
    """The process dies at this point."""


class FakeFile:
    """synced: what survives a loss of power."""

    def __init__(self, disk: FakeDisk) -> None:
        self.disk = disk
        self.data = bytearray()
        self.synced = b""

    def write(self, parts, offset):
        assert 0 < len(parts) <= MAX_PARTS
        assert offset == len(self.data), "a write leaves a hole or overwrites"
        data = b"".join(bytes(part) for part in parts)
        taken = self.disk.step("write", len(data))
        self.data += data[:taken]
        if taken < len(data) and self.disk.dies:
            raise Crash
        return taken

    def read(self, offset, size):
        return memoryview(bytes(self.data[offset : offset + size]))

    def size(self):
        return len(self.data)

    def truncate(self, size):
        self.disk.step("truncate")
        assert size <= len(self.data)
        del self.data[size:]

    def sync(self):
        self.disk.step("sync")
        self.synced = bytes(self.data)

    def duplicate(self):
        return self

    def close(self):
        pass

    def copy(self, disk):
        made = FakeFile(disk)
        made.data, made.synced = bytearray(self.data), self.synced
        return made


class FakeDisk:
    """A directory.

    capacity: bytes of all files; None without bound. crash_at: number of the operation that kills the process; a write
    gets as far as half of it. errors: operation -> OSError that it raises.
    """

    def __init__(self) -> None:
        self.files: dict[str, FakeFile] = {}
        self.durable: dict[str, FakeFile] = {}
        self.capacity: int | None = None
        self.crash_at: int | None = None
        self.dies = False
        self.errors: dict[str, OSError] = {}
        self.operations: list[str] = []
        self.locked = False

    def step(self, operation, size=0):
        """Count an operation; how many of `size` bytes it takes."""
        self.operations.append(operation)
        if self.dies:
            raise Crash
        if operation in self.errors:
            raise self.errors[operation]
        if self.crash_at is not None and len(self.operations) > self.crash_at:
            self.dies = True
            if operation != "write":
                raise Crash
            return size // 2
        if operation == "write" and self.capacity is not None:
            free = self.capacity - sum(len(file.data) for file in self.files.values())
            if size and free <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return min(size, free)
        return size

    def path(self, name):
        return f"/run/journal/{name}"

    def lock(self):
        self.step("lock")
        if self.locked:
            raise BlockingIOError(errno.EAGAIN, "locked")
        self.locked = True

    def unlock(self):
        self.locked = False

    def names(self):
        return list(self.files)

    def create(self, name):
        self.step("create")
        assert name not in self.files
        self.files[name] = FakeFile(self)
        return self.files[name]

    def open(self, name):
        return self.files[name]

    def rename(self, name, new):
        self.step("rename")
        self.files[new] = self.files.pop(name)

    def remove(self, name):
        self.step("remove")
        del self.files[name]

    def sync(self):
        self.step("sync directory")
        self.durable = dict(self.files)

    def after_kill(self):
        """What the next process finds: everything that was written, synced or not."""
        disk = FakeDisk()
        copies = {id(file): file.copy(disk) for file in (*self.files.values(), *self.durable.values())}
        disk.files = {name: copies[id(file)] for name, file in self.files.items()}
        disk.durable = {name: copies[id(file)] for name, file in self.durable.items()}
        return disk

    def after_power_loss(self, *, kept=lambda unsynced: 0, back=True):
        """What is found after a loss of power. Files made since the directory was synced are gone.

        Args:
            kept: how many of so many bytes that were not synced are on the disk all the same.
            back: files removed since the directory was synced are there again.
        """
        disk = FakeDisk()
        for name, file in self.durable.items():
            if back or name in self.files:
                left = disk.files[name] = file.copy(disk)
                size = len(file.synced) + kept(max(0, len(file.data) - len(file.synced)))
                left.data = file.data[:size] if len(file.data) >= size else bytearray(file.synced)
                left.synced = bytes(left.data)
        disk.durable = dict(disk.files)
        return disk
