"""A disk in memory that outlives the processes that use it, and forgets at a loss of power what was not synced.

A process mounts it, and can do nothing any more once it is dead. What it wrote stays for the next one; where the
machine dies, of what was not synced an arbitrary first part stays. Work on the disk takes no time of the event loop;
what it would have taken is told by `Mount.take_seconds`.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from async_rl.simulate.scenario import Fault

OPERATION_S = 1e-4
DAMAGED_BYTES = 600  # at the end of the newest file, of which one may flip
CAUSES = {
    errno.ENOSPC: "No space left on device",
    errno.EIO: "Input/output error",
    errno.EROFS: "Read-only file system",
}


class DiskWorld(Protocol):
    """What a disk needs to know of the world."""

    def fault(self, point: str) -> Fault | None: ...
    def note(self, who: str, what: str, *details: object) -> None: ...
    def synced(self, process: str) -> None: ...
    def kill(self, name: str) -> None: ...
    def lose_power(self) -> None: ...


class _Content:
    """Of a file. stable: what survives a loss of power. clean: so much of `data` is as in `stable`."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.stable = bytearray()
        self.clean = 0

    def sync(self) -> None:
        self.stable[self.clean :] = self.data[self.clean :]
        self.clean = len(self.data)

    def lose(self, kept: Callable[[int], int]) -> None:
        """Keep what is stable, and of what was written behind it as many bytes as `kept` says."""
        if self.clean == len(self.stable):
            fresh = len(self.data) - self.clean
            self.data = self.data[: self.clean + (kept(fresh) if fresh else 0)]
        else:
            self.data = bytearray(self.stable)
        self.sync()


class SimulatedDisk:
    """One directory.

    Args:
        clock: virtual seconds. of: the process that it is of. point: where its faults happen.
    """

    def __init__(
        self,
        world: DiskWorld,
        *,
        draw: random.Random,
        clock: Callable[[], float],
        of: str = "queue",
        point: str = "disk",
    ) -> None:
        self.files: dict[str, _Content] = {}
        self.of = of
        self.point = point
        self.holder: Mount | None = None
        self.world = world
        self.clock = clock
        self._durable: dict[str, _Content] = {}
        self._draw = draw
        self._free_at = 0.0
        self._broken: tuple[int, float] | None = None  # errno, until when

    def mount(self) -> Mount:
        """For one process."""
        return Mount(self)

    def lose_power(self) -> None:
        """All processes are dead; forget what was not synced."""
        for content in {id(c): c for c in (*self._durable.values(), *self.files.values())}.values():
            content.lose(self._kept)
        self.files = {name: c for name, c in self._durable.items() if name in self.files or self._draw.random() < 0.5}
        self._durable = dict(self.files)

    @property
    def is_broken(self) -> bool:
        """Whether it refuses to be written."""
        return self._broken is not None and self.clock() < self._broken[1]

    def repair(self) -> None:
        """It has room and can be written again."""
        self._broken = None

    def clear(self) -> None:
        """Somebody moved the files away."""
        self.files, self._durable = {}, {}

    def flip_a_bit(self) -> None:
        """Near the end of the newest file that holds more than its first record."""
        longest = [name for name in sorted(self.files) if len(self.files[name].data) > DAMAGED_BYTES]
        if longest:
            content = self.files[longest[-1]]
            at = len(content.data) - 1 - self._draw.randrange(DAMAGED_BYTES)
            content.data[at] ^= 1 << self._draw.randrange(8)
            content.clean = min(content.clean, at)
            content.sync()

    def sync_names(self) -> None:
        self._durable = dict(self.files)

    # ---- for a mount

    def free(self, mount: Mount) -> bool:
        """Whether a process may have the lock; one that was killed keeps it for a moment."""
        holder = self.holder
        return holder is None or holder is mount or (holder.dead and self.clock() >= self._free_at)

    def release_at(self, seconds: float) -> None:
        self._free_at = seconds

    def require_working(self, what: str) -> None:
        """Without room nothing is written; what is read-only cannot be opened either, as a journal is."""
        if self.is_broken and self._broken is not None:
            number, _ = self._broken
            if what in (("write",) if number == errno.ENOSPC else ("lock", "write", "change")):
                raise OSError(number, CAUSES[number])

    def break_for(self, number: int, seconds: float) -> None:
        self._broken = (number, self.clock() + seconds)

    def _kept(self, fresh: int) -> int:
        return self._draw.choice((0, fresh, self._draw.randrange(fresh + 1)))


class Disks:
    """Those of a queue: first that of the books, then those of the holders, by shard."""

    def __init__(self, world: DiskWorld, *, seed: int, shards: int, clock: Callable[[], float]) -> None:
        names = [f"queue-shard-{shard}" for shard in range(shards if shards > 1 else 0)]
        self.books = SimulatedDisk(world, draw=random.Random(f"disk {seed}"), clock=clock)
        self.holders = [
            SimulatedDisk(world, draw=random.Random(f"{name} {seed}"), clock=clock, of=name, point=f"disk/{name}")
            for name in names
        ]

    @property
    def all(self) -> list[SimulatedDisk]:
        return [self.books, *self.holders]

    @property
    def is_broken(self) -> bool:
        """Whether one refuses to be written."""
        return any(disk.is_broken for disk in self.all)

    def lose_power(self) -> None:
        for disk in self.all:
            disk.lose_power()

    def repair(self) -> None:
        for disk in self.all:
            disk.repair()

    def clear(self) -> None:
        for disk in self.all:
            disk.clear()


class Mount:
    """See `message_queue.journal.disk.Disk`; what one process sees of a disk."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.dead = False
        self._seconds = 0.0

    def die(self, *, linger_s: float) -> None:
        """The process is dead; it keeps the lock for a moment."""
        if not self.dead:
            self.dead = True
            self.disk.release_at(self.disk.clock() + linger_s)

    def take_seconds(self) -> float:
        """What the work since the last call would have taken."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def path(self, name: str) -> str:
        return f"/journal/{name}"

    def lock(self) -> None:
        self.begin("lock")
        if not self.disk.free(self):
            raise BlockingIOError(errno.EAGAIN, "locked")
        self.disk.holder = self

    def unlock(self) -> None:
        if self.disk.holder is self and not self.dead:
            self.disk.holder = None

    def names(self) -> list[str]:
        self.begin("read")
        return list(self.disk.files)

    def create(self, name: str) -> MountedFile:
        if (fault := self.begin("write")) is not None:
            self.end(fault)
        assert name not in self.disk.files
        self.disk.files[name] = _Content()
        return self.open(name)

    def open(self, name: str) -> MountedFile:
        return MountedFile(self, self.disk.files[name])

    def rename(self, name: str, new: str) -> None:
        self.begin("change")
        self.disk.files[new] = self.disk.files.pop(name)

    def remove(self, name: str) -> None:
        self.begin("change")
        del self.disk.files[name]

    def sync(self) -> None:
        if (fault := self.begin("sync")) is not None:
            self.end(fault)
        self.disk.sync_names()

    # ---- for its files

    def begin(self, what: str) -> Fault | None:
        """Something is about to be done; the fault that hits a part of it."""
        if self.dead:
            raise OSError(errno.EIO, "the process is dead")
        self._seconds += OPERATION_S
        fault, disk = self.disk.world.fault(f"{self.disk.point}/{what}"), self.disk
        match fault and fault.kind:
            case "disk is full" | "disk stays full":
                assert fault is not None
                disk.break_for(errno.ENOSPC, fault.amount)
                return fault
            case "disk is read-only":
                assert fault is not None
                disk.break_for(errno.EROFS, fault.amount)
            case "slow disk":
                assert fault is not None
                self._seconds += fault.amount
            case "disk fails":
                raise OSError(errno.EIO, CAUSES[errno.EIO])
            case "bits flip":
                disk.flip_a_bit()
            case "queue dies" | "machine dies":
                return fault
            case _:
                pass
        disk.require_working(what)
        return None

    def end(self, fault: Fault) -> None:
        """The process dies in the middle of something, or the disk takes no more of it."""
        match fault.kind:
            case "queue dies":
                self.disk.world.kill(self.disk.of)
            case "machine dies":
                self.disk.world.lose_power()
            case _:
                self.disk.require_working("write")
        raise OSError(errno.EIO, "the process is dead")


class MountedFile:
    """See `message_queue.journal.disk.DiskFile`."""

    def __init__(self, mount: Mount, content: _Content) -> None:
        self._mount = mount
        self._content = content

    def write(self, parts: Sequence[bytes | memoryview], offset: int) -> int:
        fault = self._mount.begin("write")
        data = b"".join(parts)
        content = self._content
        assert offset == len(content.data), "a write leaves a hole or overwrites"
        if fault is None:
            content.data += data
            return len(data)
        content.data += data[: len(data) // 2]
        if fault.kind.startswith("disk") and len(data) > 1:
            return len(data) // 2  # the rest is refused when it comes
        self._mount.end(fault)
        raise AssertionError("unreachable")

    def read(self, offset: int, size: int) -> memoryview:
        self._mount.begin("read")
        return memoryview(bytes(self._content.data[offset : offset + size]))

    def size(self) -> int:
        return len(self._content.data)

    def truncate(self, size: int) -> None:
        if self._mount.dead:
            raise OSError(errno.EIO, "the process is dead")
        del self._content.data[size:]
        self._content.clean = min(self._content.clean, size)

    def sync(self) -> None:
        fault = self._mount.begin("sync")
        if fault is not None:
            self._mount.end(fault)
        self._content.sync()
        self._mount.disk.world.synced(self._mount.disk.of)

    def duplicate(self) -> MountedFile:
        return self

    def close(self) -> None:
        return
