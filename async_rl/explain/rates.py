"""A description for the planner with the lengths, rates and interruptions that the spans of a run show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from async_rl.explain.division import StepDivision, total
from async_rl.explain.records import ExplainError, Records
from async_rl.explain.requests import RequestModel
from async_rl.plan.description import (
    Description,
    Distribution,
    Interruptions,
    PlanError,
    Publish,
    Rates,
    Workload,
)
from async_rl.plan.measured import cluster_of
from message_queue.staleness import StalenessConfig


def describe(records: Records, steps: Sequence[StepDivision], requests: RequestModel) -> Description:
    """The cluster, workload and rates of these steps.

    Raises:
        ExplainError: no step has its lengths, or they make no plan.
    """
    config = records.config
    lengths = [sum(t for _, t in spans) for s in steps for g in records.batches.get(s.step, ()) for spans in g["spans"]]
    if not lengths or not requests.decode_s + requests.decode_s_per_request:
        raise ExplainError("schedule.jsonl has no lengths of these steps")
    staleness = StalenessConfig(**config["staleness"])
    updates = config["trainer"].get("updates_per_batch", 1)
    batches = (staleness.max_staleness + 1) // updates - 1  # the simulation makes one update per batch
    parallel = config["trainer"]["parallel"]
    unit = parallel["tensor"] * parallel["pipeline"] * parallel["context"]
    cluster = cluster_of(config).model_copy(update={"train_gpus_unit": unit})
    try:
        return Description(
            cluster=cluster,
            workload=_workload(records, requests, lengths),
            rates=_rates(records, steps, requests, tokens=sum(lengths) / len(steps) / cluster.train_gpus),
            publish=Publish(
                on_update=config["rollout"]["on_update"],
                kv=config["rollout"]["kv"],
                mode=config["sync"]["mode"],
                max_paused=config["sync"]["max_paused"],
                every=max(1, config["sync"].get("every", 1) // updates),
            ),
            staleness=StalenessConfig(
                max_staleness=batches, policy=staleness.policy, max_requeues=staleness.max_requeues
            ),
            interruptions=_interruptions(records, requests, updates=updates),
        )
    except (ValueError, PlanError) as error:
        raise ExplainError(f"the measured rates make no plan: {error}") from error


def _workload(records: Records, requests: RequestModel, lengths: Sequence[int]) -> Workload:
    rollout = records.config["rollout"]
    turns = max(1, round(requests.turns))
    calls = [span.seconds for span in records.of("tool")]
    per_gap = requests.tool_calls / (turns - 1) if turns > 1 else 0.0  # calls between two turns
    return Workload(
        groups_per_batch=rollout["groups_per_batch"],
        trajectories_per_group=rollout["trajectories_per_group"],
        lengths=Distribution(kind="empirical", values=tuple(lengths)),
        turns=turns,
        tool_s=Distribution(kind="empirical", values=tuple(s * per_gap for s in calls))
        if calls and turns > 1
        else Distribution(),
    )


def _rates(records: Records, steps: Sequence[StepDivision], requests: RequestModel, *, tokens: float) -> Rates:
    """Rates of trainer, replicas and publishes.

    Args:
        tokens: trained in a step by one rank.
    """
    seconds = total(steps)
    start = steps[0].start
    publishes = [s.seconds for s in records.of("publish") if s.start >= start]
    pauses = [s for s in records.of("pause") if s.start >= start]
    loads = [s.seconds for s in records.of("load") if s.start >= start] or [s.seconds for s in pauses]
    load_s = _mean(loads)
    sync, replicas = records.config["sync"], max(1, len({s.process for s in pauses}))
    rounds = math.ceil(replicas / sync["max_paused"]) if sync["mode"] == "rolling" else 1
    return Rates(
        decode_s=max(requests.decode_s, 1e-9),
        decode_s_per_request=requests.decode_s_per_request,
        max_running=requests.max_running,
        prefill_tokens_per_s=requests.prefill_tokens_per_s,
        train_tokens_per_s=tokens * len(steps) / max(1e-9, seconds.get("train", 0.0)),
        train_s=seconds.get("other", 0.0) / len(steps),
        export_s=_mean([s.seconds for s in records.of("export") if s.start >= start]),
        transfer_s=max(0.0, _mean(publishes) - rounds * _mean([s.seconds for s in pauses])),
        load_s=load_s,
    )


def _interruptions(records: Records, requests: RequestModel, *, updates: int) -> Interruptions:
    config = records.config
    validation, checkpoint = config.get("validation", {}), config.get("checkpoint", {})
    checkpoints = [s.seconds for s in records.of("checkpoint")]
    every = validation.get("every", 0)
    ended = [r for r in records.ledger.values() if r["outcome"] in ("trained", "dropped")]
    failed = [r for r in ended if r["outcome"] == "dropped" and not _expired(r)]
    return Interruptions(
        checkpoint_every=max(1, checkpoint.get("every", 0) // updates),
        checkpoint_s=_mean(checkpoints) if checkpoint.get("every", 0) else 0.0,
        validation_every=max(1, every // updates),
        validation_trajectories=validation.get("prompts", 0) * validation.get("samples", 1) if every else 0,
        failed=len(failed) / len(ended) if ended else 0.0,
        slow_replica=max(requests.slow.values(), default=1.0),
    )


def _expired(record: Mapping[str, Any]) -> bool:
    return (record["reason"] or "").startswith(("expired", "requeued"))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
