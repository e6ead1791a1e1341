"""Frozen teachers score the trajectories of a rollout worker, while it rolls out others.

    agent loop ends ──> the teacher of its prompt scores each sequence ──> the group is complete
         ^                               │
         └── no new rollout starts ──────┘ while `max_waiting` trajectories wait for this teacher

A request that fails is repeated, up to `tries` times. Then the rollout has failed; `rollout.failure` decides about its
group. A request on a replica that dies moves to another one, or waits for its successor; this is no failed try.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Gt

from agent_loop.bounds import Count, bounded
from agent_loop.loop import Prompt
from agent_loop.timeline import timed
from async_rl.inference.notifier import Notifier
from async_rl.inference.router import ReplicaRouter
from async_rl.inference.scores import ScoreRequest
from async_rl.inference.select import EngineConfig
from message_queue.errors import EngineError, PromptError, ReplicaLostError, RolloutError
from message_queue.training_sequence import TeacherScores, TrainingSequence, TrajectoryScores
from message_queue.trajectory import Trajectory

NO_TEACHER = ""
"""`Prompt.teacher` of a prompt whose tokens have no teacher term."""


class TeacherError(RolloutError):
    """A teacher did not score a trajectory in any of its tries; names the teacher and the last cause."""


@bounded("teachers")
class TeacherConfig:
    """A frozen model that scores the tokens of the student."""

    checkpoint: Path
    """Hugging Face folder, or name of a model at the hub, as of model.checkpoint. Its tokenizer has the student's
    tokens with the same ids."""
    engine: EngineConfig
    """Engine and replicas of the teacher. If they are not given, name, device and dtype are those of `engine`, and
    max_model_len leaves one token more than the longest rollout."""
    max_waiting: Count = 256
    """Ended trajectories that wait for a score before a rollout worker starts no new one."""
    timeout_s: Annotated[float, Gt(0)] = 300.0
    """Bound in seconds on the score of one sequence by a replica."""
    tries: Count = 3
    """Times that a score is asked for before the rollout counts as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringCounts:
    """What the teachers of a worker did since its last report."""

    trajectories: int = 0
    """Trajectories that were scored."""
    seconds: float = 0.0
    """Sum over them of the seconds from the end of the rollout to its scores."""
    failures: int = 0
    """Tries that failed."""
    most_waiting: int = 0
    """Most trajectories that waited at a time."""

    def __add__(self, other: ScoringCounts) -> ScoringCounts:
        return ScoringCounts(
            trajectories=self.trajectories + other.trajectories,
            seconds=self.seconds + other.seconds,
            failures=self.failures + other.failures,
            most_waiting=max(self.most_waiting, other.most_waiting),
        )

    def metrics(self) -> dict[str, float]:
        """Metrics of a train step."""
        return {
            "teacher/seconds": self.seconds / self.trajectories if self.trajectories else math.nan,
            "teacher/failures": self.failures,
            "teacher/waiting": self.most_waiting,
        }


class Teachers:
    """The teachers as a rollout worker uses them.

    Args:
        configs: name -> settings.
        routers: name -> its replicas.
        top_k: most likely tokens of each position.
        vocab_size: ids of the student.
    """

    def __init__(
        self,
        configs: Mapping[str, TeacherConfig],
        *,
        routers: Mapping[str, ReplicaRouter],
        top_k: int,
        vocab_size: int,
    ) -> None:
        self._configs, self._routers = configs, routers
        self._top_k, self._vocab_size = top_k, vocab_size
        self._waiting = dict.fromkeys(configs, 0)
        self._changed = Notifier()
        self._numbers = itertools.count()
        self._counts = ScoringCounts()

    def of(self, prompt: Prompt) -> str | None:
        """Name of the teacher of a prompt; None if it has none.

        Raises:
            PromptError: there is no such teacher, or the prompt names none of several.
        """
        try:
            return teacher_of(prompt, self._configs)
        except ValueError as error:
            raise PromptError(str(error)) from error

    def take_counts(self) -> ScoringCounts:
        """Counts since the last call; those that wait still wait."""
        counts, waiting = self._counts, max(self._waiting.values(), default=0)
        self._counts = ScoringCounts(most_waiting=waiting)
        return counts

    async def room(self, name: str) -> None:
        """Return once fewer than `max_waiting` trajectories wait for a teacher."""
        while self._waiting[name] >= self._configs[name].max_waiting:
            await self._changed.wait()

    async def score(self, name: str, trajectory: Trajectory, *, session: str) -> None:
        """Add the scores of a teacher to a closed trajectory.

        Raises:
            TeacherError: all tries failed. ReplicaLostError: no replica of the teacher is left.
        """
        started = asyncio.get_running_loop().time()
        self._waiting[name] += 1
        self._counts += ScoringCounts(most_waiting=self._waiting[name])
        try:
            with timed("score", teacher=name, tokens=trajectory.num_sampled):
                trained, parts = trajectory.rewards, trajectory.sequence_parts()
                agents = [part.path.agent for part in parts]
                scoring = (
                    self._scores(name, sequence, session=session, trained=trained is None or agent in trained)
                    for agent, sequence in zip(agents, trajectory.sequences(), strict=True)
                )
                scores: TrajectoryScores = tuple(await asyncio.gather(*scoring))
        finally:
            self._waiting[name] -= 1
            self._changed.notify_all()
        trajectory.add_scores(scores)
        seconds = asyncio.get_running_loop().time() - started
        self._counts += ScoringCounts(trajectories=1, seconds=seconds)

    async def _scores(
        self, name: str, sequence: TrainingSequence, *, session: str, trained: bool
    ) -> TeacherScores | None:
        """Scores of the tokens in the loss of a sequence; None if it has none or is not trained."""
        if not (trained and sequence.runs):
            return None
        config, first = self._configs[name], sequence.runs[0].start
        error: Exception | None = None
        for _ in range(config.tries):
            request = ScoreRequest(
                request_id=f"score-{session}#{next(self._numbers)}.",
                token_ids=sequence.token_ids,
                first=first,
                top_k=self._top_k,
            )
            try:
                found = await self._routers[name].score(request, timeout_s=config.timeout_s)
            except ReplicaLostError:
                raise
            except TimeoutError:
                error = TimeoutError(f"no answer within teachers.{name}.timeout_s={config.timeout_s:g}")
            except EngineError as failure:
                error = failure
            else:
                places = np.concatenate([np.arange(run.start, run.start + run.tokens) for run in sequence.runs])
                return self._of_student(found.take(places - first))
            self._counts += ScoringCounts(failures=1)
        raise TeacherError(
            f"teacher {name} failed {config.tries} times (teachers.{name}.tries); the last cause: {error}"
        )

    def _of_student(self, scores: TeacherScores) -> TeacherScores:
        """The scores, without tokens that the student does not have."""
        ids, top = scores.ids, scores.top_logprobs
        if not (foreign := ids >= self._vocab_size).any():
            return scores
        return TeacherScores(
            logprobs=scores.logprobs,
            ids=np.where(foreign, -1, ids).astype(np.int32),
            top_logprobs=np.where(foreign, -np.inf, top).astype(np.float32),
        )


def teacher_of(prompt: Prompt, teachers: Mapping[str, TeacherConfig]) -> str | None:
    """Name of the teacher of a prompt: the one that it names, else the only one; None for NO_TEACHER, or without any.

    Raises:
        ValueError: there is no such teacher, or the prompt names none of several.
    """
    if not teachers or prompt.teacher == NO_TEACHER:
        return None
    if prompt.teacher is None and len(teachers) == 1:
        return next(iter(teachers))
    if prompt.teacher is None:
        raise ValueError(
            f"prompt {prompt.index} names no teacher, and the run has {', '.join(teachers)}; name one of them, or "
            f"{NO_TEACHER!r} for none (Prompt.teacher, or the column of Task(teacher=...))"
        )
    if prompt.teacher not in teachers:
        raise ValueError(
            f"prompt {prompt.index} names the teacher {prompt.teacher!r}, and the run has {', '.join(teachers)}; name "
            f"one of them, or {NO_TEACHER!r} for none, or add teachers.{prompt.teacher}"
        )
    return prompt.teacher
