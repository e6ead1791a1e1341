"""The journal's writer in turns of the event loop, in place of a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from async_rl.simulate.disk import Mount
from message_queue.journal.errors import JournalClosed
from message_queue.journal.log import JournalConfig, JournalLog
from message_queue.journal.writer import Answer, Job, Writer


class LoopWriter(Writer):
    """Does what waits a moment after it was submitted, and answers once the disk would be done.

    Args:
        mount: of the process that it runs in; once that is dead nothing is done any more.
        wait_s: how long a job waits until it is done.
    """

    def __init__(
        self,
        log: JournalLog,
        /,
        *,
        config: JournalConfig,
        deliver: Callable[[Sequence[Answer]], None],
        mount: Mount,
        wait_s: Callable[[], float],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._mount = mount
        self._wait_s = wait_s
        self._answers_to = deliver
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        self._busy_until = 0.0
        super().__init__(log, config=config, deliver=self._answer_later)

    def submit(self, job: Job) -> None:
        super().submit(job)
        self._look_after(self._wait_s())

    def close(self) -> None:
        if self._closed is None:
            self._closed = JournalClosed("the journal is closed")
        super().close()

    # ---- in place of the thread

    def _begin(self) -> None:
        self._look_after(self._wait_s())

    def _wait_ended(self) -> None:
        if not self._ended and not self._mount.dead:
            self._ended = True
            self._run()

    def _now(self) -> float:
        return self._loop.time()

    def _answer_later(self, answers: Sequence[Answer]) -> None:
        now = self._loop.time()
        self._busy_until = max(self._busy_until, now) + self._mount.take_seconds()
        self._loop.call_at(self._busy_until, self._answers_to, answers)

    def _look_after(self, seconds: float) -> None:
        at = max(self._loop.time() + seconds, self._busy_until)
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._turn)

    def _turn(self) -> None:
        """What the thread does in one go."""
        self._timer = None
        if self._ended or self._mount.dead:
            return
        if (jobs := self._due()) is not None:
            try:
                self._under_way.update(jobs)
                self._do(jobs)
            except BaseException as error:  # noqa: BLE001 - whoever waits for a job is told, whatever happened
                self._ended = True
                self._fail(error)
                self._log.files.close()
                return
        self._busy_until = max(self._busy_until, self._loop.time()) + self._mount.take_seconds()
        if self._jobs or self._cleaning:
            self._look_after(self._wait_s())
        elif (wait_s := self._seconds_to_sync()) is not None:
            self._look_after(max(wait_s, 0.0))
