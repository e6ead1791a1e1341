"""How a rollout worker is built, in the driver's process or its own."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import AgentLoop, TurnLimits
from agent_loop.programs.endpoint.host import Sessions
from agent_loop.programs.endpoint.turns import turn_reader
from agent_loop.programs.program import ProgramLoop
from agent_loop.tool_use import TOOL_ERRORS
from agent_loop.tools.tool import PauseGate
from agent_loop.user_errors import Failure
from async_rl.config import RunConfig
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.router import ReplicaRouter
from async_rl.rollout.recorded import RolloutLog
from async_rl.rollout.rollouter import Rollouter
from async_rl.rollout.schedule_replay import NoReplay
from async_rl.rollout.task import Task, build_task
from async_rl.rollout.validator import Validator
from async_rl.rollout.worker import RolloutWorker
from async_rl.weights.model_info import read_model_info


def build_worker(
    config: RunConfig, *, name: str, checkpoint: Path, pool: ReplicaPool, schedule_replay: NoReplay | None = None
) -> RolloutWorker:
    """A worker in this process.

    Args:
        checkpoint: its tokenizer is used.
        pool: the replicas, as the worker sees them.
        schedule_replay: keeps the rollouts to a schedule; None lets them run.
    """
    schedule_replay, gate, rollout = schedule_replay or NoReplay(), PauseGate(), config.rollout
    task, engine = build_task(config.task, seed=config.seed), schedule_replay.engine(ReplicaRouter(pool))
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)

    info = read_model_info(checkpoint)
    sessions = None if task.program is None else Sessions(config.endpoint)

    def build_loop(sampling: SamplingConfig) -> AgentLoop:
        parts: dict[str, Any] = {"engine": engine, "tokenizer": tokenizer, "sampling": sampling}
        if sessions is None:
            return schedule_replay.loop(task.build_loop(**parts, limits=rollout.limits, gate=gate))
        return schedule_replay.loop(_program_loop(task, sessions, **parts, limits=rollout.limits, family=info.family))

    loop = build_loop(rollout.sampling)
    same_sampling = config.validation_sampling == rollout.sampling
    validation_loop = loop if same_sampling else build_loop(config.validation_sampling)
    routing = info.routing if config.captures_routing else None

    def rollouter(log: RolloutLog | None) -> Rollouter:
        return Rollouter(
            loop=loop,
            routing=routing,
            trajectories_per_group=rollout.trajectories_per_group,
            resume_routing=rollout.resume_routing,
            log=log,
            failure=rollout.failure,
            note=lambda failure: worker.report(failure),
            failed=lambda rollout: worker.report(rollout),
            decode=decode if rollout.record.steps else None,
        )

    decode = partial(tokenizer.decode, skip_special_tokens=False)
    validator = Validator(
        loop=validation_loop,
        routing=routing,
        decode=decode,
        resume_routing=rollout.resume_routing,
    )
    worker = RolloutWorker(
        name,
        rollouter=rollouter,
        validator=validator,
        gate=gate,
        pool=pool,
        replies_s=config.cluster.stop_timeout_s / 2,  # the driver waits for a flush as long as for a stop
        sessions=sessions,
    )
    TOOL_ERRORS.handlers = [_Reports(worker)]
    return worker


def _program_loop(
    task: Task,
    sessions: Sessions,
    *,
    engine: Engine,
    tokenizer: Any,
    sampling: SamplingConfig,
    limits: TurnLimits,
    family: str,
) -> ProgramLoop:
    """The loop of a task with an agent program."""
    assert task.program is not None
    return ProgramLoop(
        program=task.program,
        gateway=sessions,
        engine=engine,
        chat=task.chat(tokenizer),
        read=turn_reader(tokenizer, family=family),
        reward=task.reward,
        limits=limits,
        sampling=sampling,
        agents=task.agents,
    )


class _Reports(logging.Handler):
    """Reports the messages of a logger to the driver; a record may have `kind` and `line` of a Failure."""

    def __init__(self, worker: RolloutWorker) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        fields = vars(record)
        kind, line = fields.get("kind", record.name), fields.get("line", "")
        self._worker.report(Failure(kind=kind, line=line, text=record.getMessage()))
