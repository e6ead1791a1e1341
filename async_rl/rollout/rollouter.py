"""One admitted prompt -> one prompt group. A bad rollout is data (a typed drop with its reason), not a crash.

A failed rollout is retried from its current content: a call of a reward or tool is repeated, a decode continues, and no
token is sampled twice. If a tool has lost the state of the rollout, it starts over with an empty trajectory. A rollout
that fails permanently is handled by `FailureConfig.on_failed`: the group is dropped,
the rest is trained without it, or another rollout of the same prompt takes its place.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Lt

from agent_loop.boundary import boundary
from agent_loop.bounds import Count, bounded
from agent_loop.loop import AgentLoop, Prompt
from agent_loop.timeline import OpenSpan, Timeline, enclosing
from agent_loop.user_errors import Failure, failure_of, innermost
from async_rl.files.rollouts import FailedRollout, tool_calls_of
from async_rl.rollout.content.format import RolloutRecord, RolloutStep
from async_rl.rollout.recorded import RecordedTrajectory, RolloutLog, RolloutLogError, TokenCount
from async_rl.rollout.teachers import NO_TEACHER, TeacherError, Teachers
from message_queue.errors import ContractError, EngineError, PromptError, RolloutError, StateLostError
from message_queue.ledger import Drop, DropKind
from message_queue.tokens import Int32Array, RoutingSpec, StopReason, TokenOutput
from message_queue.trajectory import Admission, PromptGroup, ResumeRouting, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that will not be trained."""

    group: int
    """Id of the group."""
    reason: Drop
    """Reason of the drop."""
    segments: int
    """Number of discarded segments."""
    lengths: tuple[tuple[int, bool], ...]
    """(sampled tokens, whether it was finished) of each trajectory."""
    line: str = ""
    """Line of the user that failed a rollout, as in `Failure`."""

    @property
    def expired(self) -> bool:
        """Whether it was cancelled from outside, because it can no longer be trained; otherwise a rollout failed."""
        return self.reason.kind is DropKind.EXPIRED

    @property
    def tokens(self) -> int:
        """Number of discarded sampled tokens."""
        return sum(tokens for tokens, _ in self.lengths)


_DECODING = ThreadPoolExecutor(1, "failed-rollouts")
OnFailed = Literal["drop", "rest", "fill"]
OF_CODE = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError),
    *(TypeError, ValueError),
)
"""Kinds of errors that the same code usually raises again."""


@bounded("rollout.failure")
class FailureConfig:
    """Handling of failed rollouts."""

    max_retries: Annotated[int, Ge(0)] = 0
    """Most retries of one rollout.

    An error of a user's code, such as a TypeError, is not retried if it failed another rollout at every try and no
    rollout succeeded since. A prompt that does not fit is never retried.
    """
    retry_wait_s: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    """Seconds from a failure to its retry."""
    on_failed: OnFailed = "drop"
    """Handling of a group with a permanently failed rollout.

    `drop`: its other rollouts are cancelled. `rest`: they are trained without it, if at least two are left. `fill`:
    another rollout of the prompt takes its place, up to `max_fills` times; then as `drop`.
    """
    max_fills: Count = 1
    """Most rollouts that `fill` adds to one group."""


def session_name(group: int, number: int) -> str:
    """Session name of one trajectory of a group; without "#"."""
    return f"g{group}-t{number}"


@dataclass(slots=True, eq=False)
class _Roll:
    """A group in rollout."""

    task: asyncio.Task[object]
    """Task of its agent loops."""
    prompt: Prompt
    """Its prompt."""
    admission: Admission
    """Its admission."""
    handout: int
    """Number of this hand-out of the group, written into each of its records."""
    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])
    """All its trajectories."""
    cancelled: Drop | None = None
    """Reason of a cancel; None if the group was not cancelled."""
    ended: list[OpenSpan] = field(default_factory=list[OpenSpan])
    """Spans of the trajectories that have ended and wait for others of the group."""

    @property
    def num_sound(self) -> int:
        """Number of trajectories that did not fail."""
        return sum(t.stop_reason is not StopReason.ERROR for t in self.trajectories)


class Rollouter:
    """Runs the agent loops of a group side by side.

    Args:
        loop: complete agent loop; its engine waits, aborts and resumes by itself.
        routing: layout of the routing rows; None if the run captures none.
        trajectories_per_group: rollouts of each prompt.
        resume_routing: handling of rows that a resumed generation recomputes.
        log: stores rollouts while they grow; None for none.
        failure: handling of failed rollouts.
        note: called with every failure; its text names the rollout.
        failed: called with each rollout that failed at its last try, or starts over; needs `decode`.
        decode: token ids -> text, with control tokens; called in a thread. None for no calls of `failed`.
        teachers: score each trajectory when its agent loop has ended; None without any.

    Attributes:
        tokens: number of sampled tokens, by group.
        timeline: time spans of the rollouts.
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
        note: Callable[[Failure], None] = lambda _failure: None,
        failed: Callable[[FailedRollout], None] = lambda _rollout: None,
        decode: Callable[[Int32Array], str] | None = None,
        teachers: Teachers | None = None,
    ) -> None:
        self._teachers = teachers
        self._failure = failure or FailureConfig()
        self._note = note
        self._failed = failed
        self._decode = decode
        self._log = log
        self._loop = loop
        self._routing = routing
        self._resume_routing: ResumeRouting = resume_routing
        self._n = trajectories_per_group
        self._rolls: dict[int, _Roll] = {}  # by group
        self._failing = set[str]()  # lines of users that failed a rollout at every try since the last one succeeded
        self.tokens = TokenCount()
        self.timeline = Timeline("rollout")

    def cancel(self, group: int, *, reason: Drop) -> None:
        """Give up a group in rollout; its `roll` returns a DroppedGroup. No effect on other groups."""
        roll = self._rolls.get(group)
        if roll is not None and roll.cancelled is None:
            roll.cancelled = reason
            roll.task.cancel()

    async def flush(self) -> None:
        """Return once all tokens generated so far are stored."""
        if self._log is not None:
            await self._log.flush()

    async def roll(
        self, prompt: Prompt, admission: Admission, *, existing: Sequence[Trajectory] = (), handout: int = 0
    ) -> PromptGroup | DroppedGroup:
        """Run all trajectories of one prompt. Failed ones stay in the group, with stop reason `ERROR`.

        Args:
            existing: trajectories of the group from before a restart; open ones continue, closed ones stay unchanged.
            handout: number of this hand-out of the group, written into each of its records.

        Raises:
            EngineError: the engines cannot serve; this is a failed stage, not a failed rollout.
            RolloutLogError: rollouts cannot be stored; this is a failed stage too.
        """
        task = asyncio.current_task()
        assert task is not None
        roll = self._rolls[admission.group] = _Roll(task, prompt, admission, handout)
        self.tokens.add(admission.group, sum(t.num_sampled for t in existing))
        for number, trajectory in enumerate(existing or [self._new_trajectory() for _ in range(self._n)]):
            roll.trajectories.append(self._watched(roll, number, trajectory))
        try:
            reason, line = await self._run_all(roll)
            if reason is None:
                await self.flush()
        except asyncio.CancelledError:
            if roll.cancelled is None:
                raise
            reason, line = roll.cancelled, ""
            task.uncancel()
        finally:
            del self._rolls[admission.group]
            for span in roll.ended:
                self.timeline.end(span)
        if reason is not None:
            return DroppedGroup(
                group=admission.group,
                reason=reason,
                line=line,
                segments=sum(len(t.segments) for t in roll.trajectories),
                lengths=tuple((t.num_sampled, t.closed) for t in roll.trajectories),
            )
        return PromptGroup(
            group=admission.group,
            prompt=prompt.index,
            admitted_version=admission.admitted_version,
            admitted_update=admission.admitted_update,
            trajectories=roll.trajectories,
        )

    def _new_trajectory(self) -> Trajectory:
        return Trajectory(routing=self._routing, resume_routing=self._resume_routing)

    def _watched(self, roll: _Roll, number: int, trajectory: Trajectory) -> Trajectory:
        """A trajectory whose tokens are counted and, if there is a log, stored while it grows."""
        group, handout = roll.admission.group, roll.handout

        def record(at: int, what: RolloutStep, path: int) -> None:
            if isinstance(what, TokenOutput):
                self.tokens.add(group, len(what))
            found = RolloutRecord(group=group, trajectory=number, handout=handout, at=at, what=what, path=path)
            if self._log is not None:
                self._log.append(found)

        made = RecordedTrajectory(trajectory, record=record, flush=self.flush)
        taught = self._teachers is not None and roll.prompt.teacher != NO_TEACHER
        made.awaits_scores = taught and made.scores is None and made.stop_reason is not StopReason.ERROR
        return made

    async def _run_all(self, roll: _Roll) -> tuple[Drop | None, str]:
        """Fill all trajectories side by side. Returns the reason and the user's line if the group failed."""
        self._fail_replaced(roll)
        prompt, trajectories = roll.prompt.index, roll.trajectories
        try:
            async with asyncio.TaskGroup() as rollouts:
                for number, trajectory in enumerate(trajectories):
                    if not trajectory.closed or trajectory.awaits_scores:
                        rollouts.create_task(self._member(roll, number))
                if self._failure.on_failed == "fill":
                    for _ in range(self._n - roll.num_sound):  # failed before a restart
                        rollouts.create_task(self._member(roll, self._grow(roll)))
        except ExceptionGroup as errors:
            fatal = errors.subgroup((EngineError, ContractError, RolloutLogError))
            if fatal is not None:
                raise fatal from None
            failure = failure_of(errors.exceptions[0])
            untaught = isinstance(errors.exceptions[0], TeacherError)
            kind = DropKind.TEACHER_FAILED if untaught else DropKind.ROLLOUT_FAILED
            return Drop(kind, f"prompt {prompt}: {failure.text}"), failure.line
        if not all(trajectory.closed for trajectory in trajectories):
            text = f"prompt {prompt}: a rollout ended without closing its trajectory"
            return Drop(DropKind.ROLLOUT_FAILED, text), ""
        if roll.num_sound < min(2, self._n):
            return Drop(DropKind.TOO_FEW_LEFT, f"{roll.num_sound} of {self._n} are left"), ""
        return None, ""

    def _fail_replaced(self, roll: _Roll) -> None:
        """Close rollouts that failed before a restart, if the record of their end is damaged.

        With `fill`, each failed rollout has a replacement. One that is open again would be one too many.
        """
        surplus = max(0, roll.num_sound - self._n)
        for trajectory in [t for t in roll.trajectories if not t.closed][:surplus]:
            trajectory.close(stop_reason=StopReason.ERROR, reward=0.0)

    def _grow(self, roll: _Roll) -> int:
        """Add a trajectory to a group; returns its number."""
        roll.trajectories.append(self._watched(roll, len(roll.trajectories), self._new_trajectory()))
        return len(roll.trajectories) - 1

    async def _member(self, roll: _Roll, number: int) -> None:
        """Run one rollout and, with `fill`, its replacements after permanent failures."""
        while True:
            span = self.timeline.span("trajectory", group=roll.admission.group, trajectory=number)
            with span as started, enclosing(started):
                succeeded = await self._run(roll, number)
            if succeeded or self._failure.on_failed != "fill":
                break
            number = self._grow(roll)
        if any(not trajectory.closed or trajectory.awaits_scores for trajectory in roll.trajectories):
            roll.ended.append(self.timeline.start("wait_group", group=roll.admission.group, trajectory=number))

    async def _run(self, roll: _Roll, number: int) -> bool:
        """Run one rollout with its retries; returns whether it succeeded, or raises if its group fails with it."""
        session, policy = session_name(roll.admission.group, number), self._failure
        for tried in range(1, policy.max_retries + 2):
            try:
                await self._run_loop(roll, number, is_retry=tried > 1)
                self._failing.clear()
                return True
            except (EngineError, ContractError, RolloutLogError):
                raise
            except Exception as error:
                failure = failure_of(error)
                line = failure.line if isinstance(innermost(error), OF_CODE) else ""
                hopeless = isinstance(error, PromptError | TeacherError) or line in self._failing
                left = tried <= policy.max_retries
                text = (
                    f"rollout {session} of prompt {roll.prompt.index} failed, {tried} of {policy.max_retries + 1} times"
                    f"{', and is not tried again' * (left and hopeless)}: {failure.text}"
                )
                self._note(replace(failure, text=text))
                if hopeless or not left:
                    self._failing |= {line} - {""}
                    await self._report_failed(roll, number, failure)
                    if not (roll.trajectories[number].turns and self._bears_failure(roll)):
                        raise
                    break
            await asyncio.sleep(policy.retry_wait_s)
        roll.trajectories[number].fail()
        return False

    async def _report_failed(self, roll: _Roll, number: int, failure: Failure) -> None:
        if self._decode is None:
            return
        trajectory, admission = roll.trajectories[number], roll.admission
        loop = asyncio.get_running_loop()  # user code may have taken all threads of its default executor
        text, turns = await loop.run_in_executor(_DECODING, text_of, trajectory, self._decode)
        self._failed(
            FailedRollout(
                group=admission.group,
                trajectory=number,
                prompt_index=roll.prompt.index,
                admitted_version=admission.admitted_version,
                error=failure.text,
                error_kind=failure.kind,
                error_line=failure.line,
                tokens=len(trajectory),
                prompt=text,
                turns=turns,
            )
        )

    async def _run_loop(self, roll: _Roll, number: int, *, is_retry: bool) -> None:
        """Run the agent loop if it has not ended, then have the teacher of the prompt score the trajectory."""
        trajectory, session = roll.trajectories[number], session_name(roll.admission.group, number)
        if self._teachers is None or (teacher := self._teachers.of(roll.prompt)) is None:
            await self._run_agent(roll, number, is_retry=is_retry)
            return
        if not trajectory.turns:
            await self._teachers.room(teacher)
        if not trajectory.closed:
            await self._run_agent(roll, number, is_retry=is_retry)
        await self._teachers.score(teacher, roll.trajectories[number], session=session)

    async def _run_agent(self, roll: _Roll, number: int, *, is_retry: bool) -> None:
        """Run the agent loop; if a tool has lost its state, on an empty trajectory in place of the existing one.

        The first record of the empty one replaces all earlier records (see `async_rl.rollout.content.reader`).
        """
        admission, trajectory = roll.admission, roll.trajectories[number]
        session, salt = session_name(admission.group, number), f"v{admission.admitted_version}"
        try:
            await run_loop(self._loop, roll.prompt, trajectory, session=session, cache_salt=salt)
        except StateLostError as error:
            failure = failure_of(error)
            text = f"rollout {session} starts over, without {trajectory.num_sampled} tokens: {error}"
            self._note(replace(failure, text=text))
            if not is_retry:  # the failure before a retry was reported
                await self._report_failed(roll, number, failure)
            self.tokens.add(admission.group, -trajectory.num_sampled)
            fresh = roll.trajectories[number] = self._watched(roll, number, self._new_trajectory())
            await run_loop(self._loop, roll.prompt, fresh, session=session, cache_salt=salt)

    def _bears_failure(self, roll: _Roll) -> bool:
        """Whether a group continues without one of its rollouts."""
        policy, added = self._failure, len(roll.trajectories) - self._n
        return policy.on_failed == "rest" or (policy.on_failed == "fill" and added < policy.max_fills)


async def run_loop(loop: AgentLoop, prompt: Prompt, trajectory: Trajectory, *, session: str, cache_salt: str) -> None:
    """Run an agent loop behind a boundary; see AgentLoop.run.

    Raises:
        RolloutError: the loop returned with an open trajectory.
        LeakedError: it let out an unrequested cancel.
    """
    run = partial(loop.run, prompt, trajectory=trajectory, session=session, cache_salt=cache_salt)
    await boundary(run, name=f"rollout {session}")
    if not trajectory.closed:
        raise RolloutError(f"the agent loop returned without closing the trajectory of prompt {prompt.index}")


def text_of(trajectory: Trajectory, decode: Callable[[Int32Array], str]) -> tuple[str, list[dict[str, object]]]:
    """Prompt and turns of a trajectory's root path, as in the files of `async_rl.files.rollouts`.

    A prompt, 5 sampled tokens, a reply of 2 and nothing more: the prompt, and one turn with text and reply.
    """
    observed = [decode(turn.observation) for turn in trajectory.turns]
    said = [
        decode(np.concatenate([s.token_ids for s in turn.segments])) if turn.segments else ""
        for turn in trajectory.turns
    ]
    turns: list[dict[str, object]] = [
        {"text": text, "tool_calls": tool_calls_of(text, before=before), "reply": reply}
        for before, text, reply in zip(observed, said, [*observed[1:], ""], strict=True)
    ]
    if turns and not turns[-1]["text"]:
        turns.pop()  # it failed before the model answered
    return next(iter(observed), ""), turns
