"""Rules of a run config that span several fields; each names the fields, their values and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.engines.select import check_engine, own_variables
from async_rl.engines.serving import known_device
from async_rl.engines.sglang_config import MAX_KEPT, SglangConfig
from async_rl.engines.vllm_config import VllmConfig
from async_rl.model_info import CheckpointError, read_model_info
from async_rl.train.families import read_shape
from async_rl.train.model import rank_environment

if TYPE_CHECKING:
    from async_rl.config import RunConfig


def problems(config: RunConfig) -> Iterator[str]:
    """Problems of a config; empty if the run can be started."""
    yield from _rollout_problems(config)
    yield from _trainer_problems(config)
    yield from _cluster_problems(config)
    yield from _unused_options(config)
    if isinstance(config.resume, Path) and not (config.resume / "run.json").is_file():
        yield f"resume is {config.resume}, which is no checkpoint folder; use auto, never or checkpoints/step-NNNNNN"
    yield from _model_problems(config)


def _rollout_problems(config: RunConfig) -> Iterator[str]:
    """What is rolled out, and when."""
    rollout, every, per_batch = config.rollout, config.sync.every, config.trainer.updates_per_batch
    if every % per_batch:
        yield (
            f"sync.every is {every} with trainer.updates_per_batch={per_batch}: weights are published between batches, "
            f"each of {per_batch} optimizer steps; set sync.every to a multiple of it"
        )
    elif config.staleness.max_staleness < every - 1:
        yield (
            f"staleness.max_staleness is {config.staleness.max_staleness} with sync.every={every} and "
            f"trainer.updates_per_batch={per_batch}: at the last optimizer step of a batch its weights are up to "
            f"{every - 1} steps old before any wait; raise the bound to at least that (to {every + per_batch - 1} so "
            "that rollouts run one batch ahead), publish more often, or make fewer updates per batch"
        )
    if rollout.workers > 1 and config.schedule is not None:
        yield (
            f"rollout.workers is {rollout.workers} with a schedule, to which only rollouts in the process of the "
            "driver keep; set rollout.workers=1"
        )
    if config.total_train_steps % per_batch:
        yield (
            f"total_train_steps is {config.total_train_steps} with trainer.updates_per_batch={per_batch}; train steps "
            f"are optimizer steps, and each batch makes {per_batch} of them: set a multiple of it"
        )
    if rollout.groups_per_batch % per_batch:
        yield (
            f"rollout.groups_per_batch is {rollout.groups_per_batch} with trainer.updates_per_batch={per_batch}; a "
            "batch is split into as many mini-batches of equal size by its groups: set a multiple of it"
        )
    if rollout.trajectories_per_group == 1 and config.advantage.name != "reinforce_plus_plus":
        yield (
            f"rollout.trajectories_per_group is 1 with advantage.name={config.advantage.name}, which compares the "
            "trajectories of a group, so nothing would be trained; use more, or advantage.name=reinforce_plus_plus"
        )
    if rollout.failure.on_failed == "fill" and rollout.failure.max_fills > rollout.trajectories_per_group:
        yield (
            f"rollout.failure.max_fills is {rollout.failure.max_fills} with rollout.trajectories_per_group="
            f"{rollout.trajectories_per_group}; a group makes up for each of its rollouts once at most: lower it"
        )
    if config.schedule is not None and config.staleness.policy != "wait":
        yield (
            f"staleness.policy is {config.staleness.policy!r} with schedule={config.schedule}; a run that keeps to a "
            "schedule trains all of it: use staleness=wait"
        )
    if rollout.limits.max_tokens > config.engine.max_model_len:
        yield (
            f"rollout.limits.max_tokens is {rollout.limits.max_tokens}, more than "
            f"engine.max_model_len={config.engine.max_model_len}; lower the one or raise the other"
        )


def _trainer_problems(config: RunConfig) -> Iterator[str]:
    """What is trained, and what training needs of a rollout."""
    rollout, trainer = config.rollout, config.trainer
    trajectories = rollout.groups_per_batch * rollout.trajectories_per_group // trainer.updates_per_batch
    if trajectories % trainer.data_parallel:
        yield (
            f"a mini-batch has {trajectories} trajectories (rollout.groups_per_batch={rollout.groups_per_batch} x "
            f"rollout.trajectories_per_group={rollout.trajectories_per_group} / trainer.updates_per_batch="
            f"{trainer.updates_per_batch}), which do not divide over {trainer.data_parallel} data-parallel ranks; "
            "change one of them"
        )
    if rollout.failure.on_failed == "rest" and trainer.data_parallel > 1:
        yield (
            f"rollout.failure.on_failed is 'rest' with {trainer.data_parallel} data-parallel ranks, over which "
            "a batch with failed rollouts does not divide; use rollout.failure.on_failed=fill or drop"
        )
    if config.loss.temperature != rollout.sampling.temperature:
        yield (
            f"loss.temperature is {config.loss.temperature} with rollout.sampling.temperature="
            f"{rollout.sampling.temperature}; logprobs are only comparable at one temperature, so set both alike"
        )
    if isinstance(config.engine, SglangConfig) and rollout.sampling.top_k >= MAX_KEPT:
        yield (
            f"rollout.sampling.top_k is {rollout.sampling.top_k} with engine.name=sglang, which returns fewer than "
            f"{MAX_KEPT} kept tokens; lower it, set it to -1, or use engine=vllm"
        )
    if trainer.router_replay != "R3" and rollout.resume_routing != "append":
        yield (
            f"rollout.resume_routing is {rollout.resume_routing!r} with trainer.router_replay="
            f"{trainer.router_replay}; rows are only captured for R3, so set trainer.router_replay=R3, or "
            "rollout.resume_routing=append"
        )


def _cluster_problems(config: RunConfig) -> Iterator[str]:
    """What the processes of a run are given."""
    engine, cluster = config.engine, config.cluster
    gpus = config.gpus_per_replica
    asked = f"cluster.gpus_per_replica is {cluster.gpus_per_replica}"
    if engine.device == "cpu" and gpus > 0:
        yield f"{asked} with engine.device=cpu, which uses none; set cluster.gpus_per_replica=null, or engine.device"
    elif engine.device == "cuda" and gpus == 0:
        yield f"{asked} with engine.device=cuda; set cluster.gpus_per_replica=null, or engine.device=cpu"
    elif engine.device == "auto" and gpus == 0 and cluster.gpus_per_rank > 0:
        yield (
            f"{asked} with engine.device=auto and cluster.gpus_per_rank={cluster.gpus_per_rank}; set "
            "cluster.gpus_per_replica=null for replicas on GPUs, or engine.device=cpu"
        )
    elif gpus > 0 and (gpus > 1 or engine.tensor_parallel > 1) and (gpus % 1 or gpus < engine.tensor_parallel):
        yield (
            f"{asked} with engine.tensor_parallel={engine.tensor_parallel}: a replica needs one whole GPU per worker, "
            "and only a replica of one worker may take a part of one; set cluster.gpus_per_replica=null"
        )
    for field, given, own in (
        ("rank_env", cluster.rank_env, set(rank_environment(config.trainer))),
        ("replica_env", cluster.replica_env, own_variables(engine)),
    ):
        if taken := sorted(own & set(given)):
            yield f"cluster.{field} sets {', '.join(taken)}, which the run sets itself; leave out {taken[0]}"
    device = known_device(engine, on_this_machine=cluster.address is None)
    if config.captures_routing and isinstance(engine, VllmConfig) and not engine.enforce_eager and device == "cpu":
        yield (
            "engine.enforce_eager is false with trainer.router_replay=R3 on the CPU, where compiled graphs return "
            "wrong expert ids without an error; set engine.enforce_eager=true, or trainer.router_replay=none"
        )


def _unused_options(config: RunConfig) -> Iterator[str]:
    """Options that another option switches off. A value equal to its default is accepted."""
    failure = config.rollout.failure
    for path, section, name, used, with_it in (
        ("staleness", config.staleness, "max_recycles", config.staleness.policy == "recycle", "staleness=recycle"),
        ("rollout.failure", failure, "max_fills", failure.on_failed == "fill", "rollout.failure.on_failed=fill"),
        ("sync", config.sync, "directory", config.sync.transport == "disk", "sync.transport=disk"),
        ("mismatch", config.mismatch, "max_k3", config.mismatch.prompts > 0, "mismatch.prompts > 0"),
    ):
        value, default = getattr(section, name), type(section).__dataclass_fields__[name].default
        if not used and value != default:
            yield f"{path}.{name} is {value}, which does nothing without {with_it}; set that, or leave it at {default}"


def _model_problems(config: RunConfig) -> Iterator[str]:
    """What the model's own config rules out."""
    if config.model.checkpoint is None:
        return
    try:
        info = read_model_info(config.model.checkpoint)
    except CheckpointError as error:
        yield f"model.checkpoint: {error}"
        return
    if info.routing is None and config.trainer.router_replay != "none":
        yield (
            f"trainer.router_replay is {config.trainer.router_replay}, but model.checkpoint "
            f"{config.model.checkpoint} is dense ({info.family}); use trainer.router_replay=none"
        )
    try:
        check_engine(
            config.engine,
            checkpoint=config.model.checkpoint,
            capture=config.captures_routing,
            force=config.forces_routing,
            on_this_machine=config.cluster.address is None,
        )
    except ValueError as error:
        yield str(error)
    try:
        read_shape(config.model.checkpoint)
    except CheckpointError as error:
        yield f"model.checkpoint: {error}"
