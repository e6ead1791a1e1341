"""One admitted prompt -> one prompt group. A bad rollout is data (a typed drop with its reason), not a crash.

A rollout that fails is tried again from what it holds: a reward is asked for again, a tool is called again, a decode
goes on; no token is sampled twice. One that fails for good costs its group, or itself alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agent_loop.engine import EngineError
from agent_loop.loop import AgentLoop, Prompt
from async_rl.rollout.recorded import NoRolloutLog, RecordedTrajectory, RolloutLog, RolloutLogError
from message_queue.contract import Admission
from message_queue.progress import RolloutRecord, RolloutStep
from message_queue.tokens import ContractError, RoutingSpec, StopReason
from message_queue.trajectory import PromptGroup, ResumeRouting, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that will not be trained, and why. segments and tokens were generated in vain.

    expired: it was cancelled from outside, because it can no longer be trained; otherwise a rollout failed.
    """

    group: int
    reason: str
    segments: int
    tokens: int
    expired: bool = False


OnFailed = Literal["drop", "rest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    """What a failed rollout costs.

    max_retries: how often it is tried again, retry_wait_s after it failed. on_failed: what becomes of the group of one
    that failed for good: `drop` (the others are cancelled) or `rest` (they are trained without it, if two are left).
    """

    max_retries: int = 0
    retry_wait_s: float = 0.0
    on_failed: OnFailed = "drop"

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"rollout.failure.max_retries is {self.max_retries}; must be >= 0")
        if not 0 <= self.retry_wait_s < float("inf"):
            raise ValueError(f"rollout.failure.retry_wait_s is {self.retry_wait_s}; must be >= 0 seconds")
        if self.on_failed not in ("drop", "rest"):
            raise ValueError(f"rollout.failure.on_failed is {self.on_failed!r}; use drop or rest")


def without_failed(group: PromptGroup) -> PromptGroup:
    """The group without trajectories that ended with an error."""
    sound = [t for t in group.trajectories if t.stop_reason is not StopReason.ERROR]
    return group if len(sound) == len(group.trajectories) else replace(group, trajectories=sound)


class Rollouter:
    """Runs the agent loops of a group side by side.

    Args:
        loop: complete agent loop; its engine waits, aborts and resumes by itself.
        routing: what a routing row means; None when the run captures none.
        trajectories_per_group: n.
        resume_routing: what becomes of rows that a resumed generation computes again.
        log: where rollouts are written down as they grow.
        failure: what a failed rollout costs. note: is told of every failure.
    """

    def __init__(
        self,
        *,
        loop: AgentLoop,
        routing: RoutingSpec | None,
        trajectories_per_group: int,
        resume_routing: ResumeRouting = "append",
        log: RolloutLog | None = None,
        failure: FailureConfig | None = None,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._failure = failure or FailureConfig()
        self._note = note
        self._log = log or NoRolloutLog()
        self._loop = loop
        self._routing = routing
        self._resume_routing: ResumeRouting = resume_routing
        self._n = trajectories_per_group
        self._running: dict[int, asyncio.Task[object]] = {}
        self._cancelled: dict[int, str] = {}

    def cancel(self, group: int, *, reason: str) -> None:
        """Give up a group that is being rolled out; its `roll` returns a DroppedGroup. No effect on any other."""
        task = self._running.get(group)
        if task is not None and group not in self._cancelled:
            self._cancelled[group] = reason
            task.cancel()

    async def flush(self) -> None:
        """Return once all that was generated so far is written down."""
        await self._log.flush()

    async def roll(
        self, prompt: Prompt, admission: Admission, *, held: Sequence[Trajectory] = ()
    ) -> PromptGroup | DroppedGroup:
        """Run all trajectories of one prompt.

        Args:
            held: trajectories of the group from before a restart, which go on; closed ones are left as they are.

        Raises:
            EngineError: the engines cannot serve; that is a failed stage, not a failed rollout. RolloutLogError: the
                same, where rollouts cannot be written down.
        """
        trajectories = self._trajectories(admission.group, held)
        task = asyncio.current_task()
        assert task is not None
        self._running[admission.group] = task
        expired = False
        try:
            failure = await self._run_all(prompt, admission, trajectories)
            if failure is None:
                await self._log.flush()
        except asyncio.CancelledError:
            failure = self._cancelled.get(admission.group)
            if failure is None:
                raise
            expired = True
            task.uncancel()
        finally:
            del self._running[admission.group]
            self._cancelled.pop(admission.group, None)
        if failure is not None:
            return DroppedGroup(
                group=admission.group,
                reason=failure,
                segments=sum(len(t.segments) for t in trajectories),
                tokens=sum(t.num_sampled for t in trajectories),
                expired=expired,
            )
        return PromptGroup(
            group=admission.group,
            prompt=prompt.index,
            admitted_version=admission.admitted_version,
            admitted_update=admission.admitted_update,
            trajectories=trajectories,
        )

    def _trajectories(self, group: int, held: Sequence[Trajectory]) -> list[Trajectory]:
        """All trajectories of a group, each as far as it is held."""
        begun = held or [Trajectory(routing=self._routing, resume_routing=self._resume_routing) for _ in range(self._n)]

        if isinstance(self._log, NoRolloutLog):
            return list(begun)

        def recorded(number: int, trajectory: Trajectory) -> Trajectory:
            def record(at: int, what: RolloutStep) -> None:
                self._log.append(RolloutRecord(group=group, trajectory=number, at=at, what=what))

            return RecordedTrajectory(trajectory, record=record, flush=self._log.flush)

        return [recorded(number, trajectory) for number, trajectory in enumerate(begun)]

    async def _run_all(self, prompt: Prompt, admission: Admission, trajectories: list[Trajectory]) -> str | None:
        """Fill all trajectories side by side; None, or why the group failed."""
        salt = f"v{admission.admitted_version}"
        try:
            async with asyncio.TaskGroup() as rollouts:
                for i, trajectory in enumerate(trajectories):
                    if trajectory.closed:
                        continue
                    session = f"g{admission.group}-t{i}"
                    rollouts.create_task(self._run(prompt, trajectory, session=session, cache_salt=salt))
        except ExceptionGroup as errors:
            fatal = errors.subgroup((EngineError, ContractError, RolloutLogError))
            if fatal is not None:
                raise fatal from None
            first = errors.exceptions[0]
            return f"rollout failed: {type(first).__name__}: {first}"
        left = sum(t.stop_reason is not StopReason.ERROR for t in trajectories)
        if left < min(2, len(trajectories)):
            return f"rollouts failed: {left} of {len(trajectories)} are left"
        return None

    async def _run(self, prompt: Prompt, trajectory: Trajectory, *, session: str, cache_salt: str) -> None:
        """One rollout, as often as it may be tried."""
        policy = self._failure
        for tried in range(1, policy.max_retries + 2):
            try:
                await self._loop.run(prompt, trajectory=trajectory, session=session, cache_salt=cache_salt)
                return
            except (EngineError, ContractError, RolloutLogError):
                raise
            except Exception as error:
                self._note(
                    f"rollout {session} failed, {tried} of {policy.max_retries + 1} times: "
                    f"{type(error).__name__}: {error}"
                )
                if tried > policy.max_retries and (policy.on_failed == "drop" or not trajectory.turns):
                    raise
            if tried <= policy.max_retries:
                await asyncio.sleep(policy.retry_wait_s)
        trajectory.close(stop_reason=StopReason.ERROR, reward=0.0)
