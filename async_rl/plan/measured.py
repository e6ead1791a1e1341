"""A description with the cluster, lengths, rates and interruptions of a run, from the files of its directory.

lengths        trajectories of `schedule.jsonl`; turns, tools and pauses of `trace.json`
decode step    fitted to the requests of `trace.json` (`requests.py`)
trainer        spans of its steps, per token; the time without a span counts per step
publish        spans of exports, transfers and pauses
interruptions  checkpoints, validations, failed groups and the slowest replica

All are means: over the second half of the batches for a plan, and without those that fill the pipeline for an
explanation (`filling`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.plan.description import (
    Cluster,
    Description,
    Distribution,
    Interruptions,
    PlanError,
    Publish,
    Rates,
    Workload,
)
from async_rl.plan.records import Records, RecordsError, read_records
from async_rl.plan.requests import RequestModel
from message_queue.ledger import DropKind
from message_queue.policies import StalenessConfig

OF_TRAINER = ("train", "export", "checkpoint")


def describe_run(directory: Path, *, cores: int | None = None) -> Description:
    """The description of a run that has ended or still runs.

    Args:
        cores: number of cores of the run's machine; None for those of this one.

    Raises:
        RecordsError: a file is missing or damaged, or the run is too short.
    """
    records = read_records(directory)
    batches = len(records.of("train"))
    try:
        bound = batches_ahead(records.config)
        if batches < (least := 2 * (bound + 2)):
            raise RecordsError(
                f"{directory / 'trace.json'} has {batches} batches; a plan of a run that is {bound} batches ahead "
                f"needs {least}"
            )
        if not records.of("generate"):
            raise RecordsError(f"{directory / 'trace.json'} has no requests")
        records = records.since(records.of("train")[batches // 2 - 1].end)
        return describe(records, RequestModel(records), first=0, cores=cores or os.cpu_count() or 1)
    except (KeyError, TypeError) as error:
        raise RecordsError(f"{directory} is not of this version of async_rl: {error!r} in its files") from error


def describe(records: Records, requests: RequestModel, *, first: int, cores: int | None = None) -> Description:
    """The cluster, workload and rates of a run.

    Args:
        first: number of batches that are left out.
        cores: number of cores of the run's machine, shared by trainer and replicas on a CPU; None if the rates shall
            be those that they had together.

    Raises:
        RecordsError: the batches have no lengths, or make no plan.
    """
    config = records.config
    trainer = _TrainerTime.of(records, first=first)
    groups = [group for batch in trainer.batches for group in records.batches.get(batch, ())]
    lengths = [sum(tokens for _, tokens in spans) for group in groups for spans in group["spans"]]
    if not lengths or not requests.decode_s + requests.decode_s_per_request:
        raise RecordsError("schedule.jsonl has no lengths of these steps")
    staleness = StalenessConfig(**config["staleness"])
    updates = config["trainer"].get("updates_per_batch", 1)
    try:
        return Description(
            cluster=_cluster(config),
            workload=_workload(records, requests, lengths),
            rates=_rates(records, requests, trainer, tokens=sum(lengths), cores=cores),
            publish=Publish(
                on_update=config["rollout"]["on_update"],
                kv=config["rollout"]["kv"],
                mode=config["sync"]["mode"],
                max_paused=config["sync"]["max_paused"],
                every=max(1, config["sync"].get("every", 1) // updates),
            ),
            staleness=StalenessConfig(
                max_staleness=batches_ahead(config), policy=staleness.policy, max_requeues=staleness.max_requeues
            ),
            interruptions=_interruptions(records, requests, updates=updates),
        )
    except (ValueError, PlanError) as error:
        raise RecordsError(f"the measured rates make no plan: {error}") from error


def batches_ahead(config: Mapping[str, Any]) -> int:
    """The bound in batches; the simulation makes one update per batch."""
    return (config["staleness"]["max_staleness"] + 1) // config["trainer"].get("updates_per_batch", 1) - 1


def filling(config: Mapping[str, Any], *, batches: int) -> int:
    """Number of a run's batches that fill the pipeline and load kernels; at most a third."""
    return min(config["staleness"]["max_staleness"] + 1, batches // 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainerTime:
    """Wall clock of the trainer over some batches."""

    batches: Sequence[int]
    """Last train step of each."""
    start: float
    """End of the batch before, in seconds since the start of the run."""
    seconds: Mapping[str, float]
    """Kind of span -> seconds; `other` is the time without one, and `wait` that for a batch."""

    @classmethod
    def of(cls, records: Records, *, first: int) -> _TrainerTime:
        """From the end of the batch before the first one to the end of the last."""
        trains = records.of("train")
        if not trains[first:]:
            raise RecordsError("trace.json has no batch of the trainer")
        waits = [span.start for span in records.of("wait")]
        start, end = trains[first - 1].end if first else min([trains[0].start, *waits]), trains[-1].end
        seconds = {kind: sum(span.overlap(start, end) for span in records.of(kind)) for kind in ("wait", *OF_TRAINER)}
        seconds["other"] = max(0.0, end - start - sum(seconds.values()))
        return cls(batches=[span.args.get("step", 0) for span in trains[first:]], start=start, seconds=seconds)

    @property
    def busy(self) -> float:
        """Share of the time in which the trainer did not wait for a batch."""
        return 1 - self.seconds["wait"] / max(1e-9, sum(self.seconds.values()))


def _workload(records: Records, requests: RequestModel, lengths: Sequence[int]) -> Workload:
    rollout = records.config["rollout"]
    turns = max(1, round(requests.turns))
    return Workload(
        groups_per_batch=rollout["groups_per_batch"],
        trajectories_per_group=rollout["trajectories_per_group"],
        lengths=Distribution(kind="empirical", values=tuple(lengths)),
        turns=turns,
        tool_s=Distribution(kind="empirical", values=tuple(requests.gaps))
        if requests.gaps and turns > 1
        else Distribution(),
        reward_s=Distribution(kind="empirical", values=tuple(requests.rewarded))
        if any(requests.rewarded)
        else Distribution(),
        without_signal=_mean([line.get("reward/groups_without_signal") or 0.0 for line in records.metrics]),
        bytes_per_token=8 + _mean([line.get("routing/bytes_per_token", 0.0) for line in records.metrics]),
    )


def _rates(records: Records, requests: RequestModel, trainer: _TrainerTime, *, tokens: int, cores: int | None) -> Rates:
    """Rates of trainer, replicas and publishes; with `cores`, those of each alone on them.

    Args:
        tokens: of all trained trajectories.
    """
    publishes = [s.seconds for s in records.of("publish") if s.start >= trainer.start]
    pauses = [s for s in records.of("pause") if s.start >= trainer.start]
    loads = pauses
    if records.config["rollout"]["on_update"] == "drain":  # such a pause also waits for requests
        loads = [s for s in records.of("load") if s.start >= trainer.start] or pauses
    sync, replicas = records.config["sync"], max(1, len({s.process for s in pauses}))
    rounds = math.ceil(replicas / sync["max_paused"]) if sync["mode"] == "rolling" else 1
    shared = 1.0 if cores is None else _shared_speed(records.config, cores)
    overlaps = batches_ahead(records.config) > 0
    of_replica = 1 - trainer.busy * (1 - shared) if overlaps else 1.0  # mean speed, over that of a replica alone
    of_trainer = 1 - requests.busy * (1 - shared) if overlaps else 1.0
    return Rates(
        decode_s=max(requests.decode_s * requests.stretch * of_replica, 1e-9),
        decode_s_per_request=requests.decode_s_per_request * requests.stretch * of_replica,
        max_running=requests.max_running,
        prefill_tokens_per_s=requests.prefill_tokens_per_s,
        train_tokens_per_s=tokens
        / _cluster(records.config).train_gpus
        / max(1e-9, trainer.seconds["train"] * of_trainer),
        train_s=trainer.seconds["other"] * of_trainer / len(trainer.batches),
        export_s=_mean([s.seconds for s in records.of("export") if s.start >= trainer.start]) * of_trainer,
        transfer_s=max(0.0, _mean(publishes) - rounds * _mean([s.seconds for s in pauses])),
        load_s=_mean([s.seconds for s in loads]),
        shared_speed=shared,
    )


def _cluster(config: Mapping[str, Any]) -> Cluster:
    """The processes of a run as GPUs; a rank and an engine rank are one each."""
    engine, ranks, parallel = config["engine"], config["trainer"]["ranks"], config["trainer"]["parallel"]
    per_replica = engine.get("tensor_parallel", 1) * engine.get("data_parallel", 1)
    return Cluster(
        gpus=ranks + engine["replicas"] * per_replica,
        gpus_per_replica=per_replica,
        train_gpus=ranks,
        train_gpus_unit=parallel["tensor"] * parallel["pipeline"] * parallel["context"],
        synchronous="split",
    )


def _shared_speed(config: Mapping[str, Any], cores: int) -> float:
    """Cores over threads of trainer, replicas and rollout workers on a CPU, at most 1; 1 on GPUs."""
    engine, trainer = config["engine"], config["trainer"]
    if engine.get("device", "auto") == "cuda" or "threads" not in engine:
        return 1.0
    of_rank = trainer["threads"] or max(1, cores // trainer["ranks"])
    threads = engine["replicas"] * engine["threads"] + trainer["ranks"] * of_rank
    threads += config["rollout"]["workers"]
    return min(1.0, cores / threads)


def _interruptions(records: Records, requests: RequestModel, *, updates: int) -> Interruptions:
    config = records.config
    validation, checkpoint = config.get("validation", {}), config.get("checkpoint", {})
    checkpoints = [s.seconds for s in records.of("checkpoint")]
    every = validation.get("every", 0)
    ended = [r for r in records.ledger.values() if r["outcome"] in ("trained", "dropped")]
    too_old = (DropKind.EXPIRED, DropKind.REQUEUED)
    failed = [r for r in ended if r["outcome"] == "dropped" and r.get("kind") not in too_old]
    return Interruptions(
        checkpoint_every=max(1, checkpoint.get("every", 0) // updates),
        checkpoint_s=_mean(checkpoints) if checkpoint.get("every", 0) else 0.0,
        validation_every=max(1, every // updates),
        validation_trajectories=validation.get("prompts", 0) * validation.get("samples", 1) if every else 0,
        failed=len(failed) / len(ended) if ended else 0.0,
        slow_replica=max(requests.slow.values(), default=1.0),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
