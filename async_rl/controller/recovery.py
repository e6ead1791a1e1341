"""Restarts trainer and queue after either fails; replicas and agent loops are reused.

open the journal -> truncate the records -> restore the trainer -> run the controller ----> done, or stopped
     ^                                                                |
     +---- from the last checkpoint and the journal <---- trainer or queue fails
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Generic

from ray.exceptions import ObjectLostError

from async_rl.cluster.queue import QueueClient, QueueUnavailable
from async_rl.cluster.trainer import TrainerLostError
from async_rl.config import RunConfig
from async_rl.controller.controller import Controller
from async_rl.controller.parts import RunParts, T
from async_rl.controller.resume import Resume
from async_rl.files.logs import notes_of
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.inference.replica import DeliveryError
from async_rl.inference.supervisor import ReplicaFactory, RestartLimit, Supervisor
from async_rl.metrics.trace import Trace
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.group_contents import ContentPlace, GroupContents, StoredContent, read_content
from async_rl.rollout.prompts import PromptOrder
from async_rl.trainer.rank_methods import TrainerRank
from message_queue.recovery import Restored


def supervised(
    config: RunConfig,
    pool: ReplicaPool,
    *,
    rollouts: Dispatcher,
    start: ReplicaFactory,
    note: Callable[[str], None],
    trace: Trace | None = None,
) -> tuple[Publisher, Supervisor]:
    """The trainer's and the controller's view of the replicas."""
    publisher = Publisher(
        pool,
        on_update=config.rollout.on_update,
        kv=config.rollout.kv,
        rollouts=rollouts,
        max_paused=config.sync.max_paused if config.sync.mode == "rolling" else None,
        staged=config.sync.mode == "staged",
        backend=config.sync.backend,
        timeout_s=config.sync.timeout_s,
        trace=trace,
    )
    supervisor = Supervisor(pool, publisher, start=start, config=config.supervision, note=note)
    return publisher, supervisor


class RecoveryLoop(Generic[T]):
    """Runs the controller until its end.

    Args:
        order: order of the prompts.
        resume: state that the first life continues from.
    """

    def __init__(self, config: RunConfig, run_parts: RunParts[T], *, order: PromptOrder, resume: Resume) -> None:
        self._config = config
        self._parts = run_parts
        self._order = order
        self._resume = resume

    async def run(self, trainer: T) -> bool:
        """Run; if the trainer or the queue fails, continue from the last checkpoint and the journal.

        A restart that fails is followed by another one; both are counted.

        Returns:
            Whether all train steps were done; False after a stop request.

        Raises:
            Exception: any other cause of a failed stage, or a failure beyond `supervision.max_restarts`.
        """
        limit, again = RestartLimit(self._config.supervision), False
        while True:
            try:
                if again:
                    trainer = await self._parts.replace_trainer(trainer)
                return await self._run_once(trainer)
            except Exception as error:
                lost = _lost_part(error)
                task = asyncio.current_task()
                ended = task is not None and task.cancelling() > 0  # the loss hid a cancellation
                if lost is None or ended or not limit.allows_one_more():
                    raise
                what = "a finished group was on a node that died" if isinstance(lost, ObjectLostError) else lost
                text = f"{what}; trainer and queue start anew from the last checkpoint and the journal"
                self._parts.recorder.warn("\n".join([text, *notes_of(lost)]))
                self._resume = Resume(self._config, again=True)
                await self._parts.publisher.resume()  # the life before may have left the replicas on hold
                again = True

    # ---- one life

    async def _run_once(self, trainer: T) -> bool:
        run_parts, place = self._parts, self._resume.content(self._parts.routing)
        queue, restored, stored = await self._open_queue(place)
        try:
            self._resume.truncate_records(restored, stored, run_parts.recorder)
            await run_parts.rollouts.open(place, live=restored.live)
            contents = GroupContents.of_restart(restored, stored, forget=run_parts.rollouts.forget)
            if self._resume.checkpoint is not None:
                await trainer.call(TrainerRank.restore, self._resume.checkpoint / "trainer")
            pipeline = Controller(
                self._config,
                run_parts,
                prompts=self._resume.prompts(self._order, restored),
                queue=queue,
                contents=contents,
                trainer=trainer,
                start=self._resume.state,
                restored=restored,
            )
            try:
                finished = await pipeline.run()
                if finished:
                    output = self._config.output_dir
                    await trainer.call(TrainerRank.save_pretrained, output / "final", like=output / "model")
            except BaseException:
                with contextlib.suppress(Exception):  # a queue that died must not hide why the run ended
                    await self._close(queue)
                raise
            await self._close(queue)
            return finished
        finally:
            queue.kill()  # one that was only out of reach must not come back next to its successor
            await run_parts.rollouts.end()

    async def _open_queue(self, place: ContentPlace) -> tuple[QueueClient, Restored, StoredContent]:
        """The queue with the groups that a restart continues. Ready groups that lack content are open."""
        journal, timeout_s = self._resume.journal(), self._config.cluster.start_timeout_s
        while True:
            queue = await self._parts.start_queue()
            try:
                restored = await queue.open(journal, timeout_s=timeout_s)
                stored = await read_content(place, restored)
                if not stored.incomplete:
                    return queue, restored, stored
                await queue.close_journal()
            except BaseException:
                queue.kill()
                raise
            queue.kill()
            journal = replace(journal, incomplete=journal.incomplete | stored.incomplete)

    async def _close(self, queue: QueueClient) -> None:
        self._parts.recorder.ledger(await queue.closing_records())
        await queue.close_journal()


def _lost_part(error: BaseException) -> BaseException | None:
    """The cause of a run's end if a trainer or queue died or fell silent, or content was on a node that died.

    A trainer that sends a version to no replica counts as dead.
    """
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_lost_part, error.exceptions)), None)
    if isinstance(error, TrainerLostError | DeliveryError | QueueUnavailable | ObjectLostError):
        return error
    return None if error.__cause__ is None else _lost_part(error.__cause__)
