"""How a rollout worker is built, in the driver's process or its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer

from agent_loop.engine import SamplingConfig
from agent_loop.loop import AgentLoop
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
from async_rl.rollout.schedule import ScheduleReplay
from async_rl.rollout.task import Task, build_task
from async_rl.rollout.teachers import Teachers
from async_rl.rollout.validator import Validator
from async_rl.rollout.worker import RolloutWorker
from async_rl.weights.model_info import read_model_info


def build_worker(
    config: RunConfig,
    *,
    name: str,
    checkpoint: Path,
    pool: ReplicaPool,
    teachers: Mapping[str, ReplicaPool] | None = None,
    schedule_replay: ScheduleReplay | None = None,
) -> RolloutWorker:
    """A worker in this process.

    Args:
        checkpoint: its tokenizer is used.
        pool: the replicas, as the worker sees them.
        teachers: teacher -> its replicas; None without any.
        schedule_replay: keeps the rollouts to a schedule; None lets them run.
    """
    rollout, gate, router = config.rollout, PauseGate(), ReplicaRouter(pool)
    task, tokenizer = build_task(config.task, seed=config.seed), cast(Any, AutoTokenizer.from_pretrained(checkpoint))
    sessions = None if task.program is None else Sessions(config.endpoint)
    info = read_model_info(checkpoint)
    scoring = None if not teachers else _scoring(config, teachers, vocab_size=info.vocab_size)
    given: dict[str, Any] = {"gate": gate, "sessions": sessions, "family": info.family, "limits": rollout.limits}

    def build_loop(sampling: SamplingConfig) -> AgentLoop:
        engine = router if schedule_replay is None else schedule_replay.engine(router)
        loop = _loop(task, tokenizer, engine=engine, sampling=sampling, **given)
        return loop if schedule_replay is None else schedule_replay.loop(loop)

    loop = build_loop(rollout.sampling)
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    routing = info.routing if config.captures_routing else None
    rows: dict[str, Any] = {"routing": routing, "resume_routing": rollout.resume_routing}

    def rollouter(log: RolloutLog | None) -> Rollouter:
        return Rollouter(
            loop=loop,
            trajectories_per_group=rollout.trajectories_per_group,
            log=log,
            failure=rollout.failure,
            note=lambda failure: worker.report(failure),
            failed=lambda rollout: worker.report(rollout),
            decode=decode if rollout.record.steps else None,
            teachers=scoring,
            **rows,
        )

    worker = RolloutWorker(
        name,
        rollouter=rollouter,
        validator=Validator(loop=build_loop(config.validation_sampling), decode=decode, **rows),
        gate=gate,
        pool=pool,
        replies_s=config.cluster.stop_timeout_s / 2,  # the driver waits for a flush as long as for a stop
        sessions=sessions,
        teachers=scoring,
        teacher_pools=teachers,
    )
    TOOL_ERRORS.handlers = [_Reports(worker)]
    return worker


def _loop(
    task: Task, tokenizer: Any, *, gate: PauseGate, sessions: Sessions | None, family: str, **parts: Any
) -> AgentLoop:
    """The agent loop of a task, or that of its program. parts: engine, sampling and limits."""
    if task.program is None or sessions is None:
        return task.build_loop(**parts, tokenizer=tokenizer, gate=gate)
    chat, read = task.chat(tokenizer), turn_reader(tokenizer, family=family)
    own: dict[str, Any] = {"program": task.program, "reward": task.reward, "agents": task.agents}
    return ProgramLoop(**own, gateway=sessions, chat=chat, read=read, **parts)


def _scoring(config: RunConfig, pools: Mapping[str, ReplicaPool], *, vocab_size: int) -> Teachers:
    """The teachers on their replicas."""
    return Teachers(
        config.teachers,
        routers={teacher: ReplicaRouter(pool) for teacher, pool in pools.items()},
        top_k=config.distillation.num_ids,
        vocab_size=vocab_size,
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
