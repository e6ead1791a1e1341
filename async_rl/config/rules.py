"""Rules that span several fields of a config. Each problem names the fields, their values and the way out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.inference.select import own_variables
from async_rl.inference.sglang.config import MAX_KEPT, SglangConfig
from async_rl.inference.vllm.config import VllmConfig
from async_rl.trainer.critic.config import CriticConfig
from async_rl.trainer.loss.distillation import DistillationConfig
from async_rl.trainer.model.model import rank_environment

if TYPE_CHECKING:
    from async_rl.config.schema import RunConfig


def problems_of(config: RunConfig) -> Iterator[str]:
    """Problems of a config; empty if the run can be started."""
    yield from _rollout_problems(config)
    yield from _schedule_problems(config)
    yield from _trainer_problems(config)
    yield from _critic_problems(config)
    yield from _cluster_problems(config)
    yield from _teacher_problems(config)
    yield from _unused_options(config)
    if isinstance(config.resume, Path) and not (config.resume / "run.json").is_file():
        yield f"resume is {config.resume}, which is no checkpoint folder; use auto, never or checkpoints/step-NNNNNN"


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
    if config.optimizer.warmup_steps >= config.total_train_steps > 0:
        yield (
            f"optimizer.warmup_steps is {config.optimizer.warmup_steps} with total_train_steps="
            f"{config.total_train_steps}: the learning rate would never reach optimizer.lr; lower the one or raise the "
            "other"
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
    advantage, taught = config.advantage, config.teachers and not config.distillation.rewards
    if rollout.trajectories_per_group == 1 and advantage.compares == "group" and not taught:
        yield (
            f"rollout.trajectories_per_group is 1 with advantage.name={advantage.name}, which compares the "
            "trajectories of a group, so nothing would be trained; use more, or advantage.name=batch_mean, spo, gae, "
            "contrastive or reinforce_plus_plus"
        )
    if rollout.drop_without_spread and advantage.compares == "batch":
        yield (
            f"rollout.drop_without_spread is {rollout.drop_without_spread} with advantage.name={advantage.name}, "
            "which compares the trajectories of a batch, so groups without spread are trained too; set it to 0"
        )
    if rollout.failure.on_failed == "fill" and rollout.failure.max_fills > rollout.trajectories_per_group:
        yield (
            f"rollout.failure.max_fills is {rollout.failure.max_fills} with rollout.trajectories_per_group="
            f"{rollout.trajectories_per_group}; a group makes up for each of its rollouts once at most: lower it"
        )
    if rollout.limits.max_tokens > config.engine.max_model_len:
        yield (
            f"rollout.limits.max_tokens is {rollout.limits.max_tokens}, more than "
            f"engine.max_model_len={config.engine.max_model_len}; lower the one or raise the other"
        )
    per_turn = rollout.limits.max_new_tokens_per_turn
    if per_turn is not None and per_turn >= rollout.limits.max_tokens:
        yield (
            f"rollout.limits.max_new_tokens_per_turn is {per_turn} with rollout.limits.max_tokens="
            f"{rollout.limits.max_tokens}, which also counts the prompt, so it bounds nothing; lower it, or raise "
            "rollout.limits.max_tokens"
        )


def _schedule_problems(config: RunConfig) -> Iterator[str]:
    """What a run that keeps to a schedule cannot do."""
    rollout = config.rollout
    if config.schedule is None:
        return
    if rollout.workers > 1:
        yield (
            f"rollout.workers is {rollout.workers} with a schedule, to which only rollouts in the process of the "
            "driver keep; set rollout.workers=1"
        )
    trains_all = f"with schedule={config.schedule}; a run that keeps to a schedule trains all of it"
    if rollout.drop_without_spread:
        yield f"rollout.drop_without_spread is {rollout.drop_without_spread} {trains_all}: set it to 0"
    if config.staleness.policy != "wait":
        yield f"staleness.policy is {config.staleness.policy!r} {trains_all}: use staleness=wait"


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
    for path, sampling in (("rollout", rollout.sampling), ("validation", config.validation_sampling)):
        if isinstance(config.engine, SglangConfig) and sampling.top_k >= MAX_KEPT:
            yield (
                f"{path}.sampling.top_k is {sampling.top_k} with engine.name=sglang, which returns fewer than "
                f"{MAX_KEPT} kept tokens; lower it, set it to -1, or use engine=vllm"
            )
    if trainer.lora.rank and config.optimizer.cpu_offload:
        yield (
            f"optimizer.cpu_offload is {config.optimizer.cpu_offload} with trainer.lora.rank={trainer.lora.rank}: the "
            "optimizer state of adapters is too small to be worth moving; set optimizer.cpu_offload=0"
        )
    if trainer.router_replay != "R3" and rollout.resume_routing != "append":
        yield (
            f"rollout.resume_routing is {rollout.resume_routing!r} with trainer.router_replay="
            f"{trainer.router_replay}; rows are only captured for R3, so set trainer.router_replay=R3, or "
            "rollout.resume_routing=append"
        )


def _critic_problems(config: RunConfig) -> Iterator[str]:
    """What the value model is for."""
    critic, schedule = config.critic, config.critic.optimizer
    if not config.has_critic:
        if changed := [f.name for f in fields(critic) if getattr(critic, f.name) != getattr(CriticConfig(), f.name)]:
            yield (
                f"critic.{changed[0]} is {getattr(critic, changed[0])}, which does nothing with advantage.name="
                f"{config.advantage.name}; set advantage.name=gae, or leave it at its default"
            )
        return
    if critic.checkpoint is not None and not (critic.checkpoint / "config.json").is_file():
        yield (
            f"critic.checkpoint is {critic.checkpoint}, which is no Hugging Face folder with a config.json; give one, "
            "or null for the weights of the policy"
        )
    if critic.warmup_steps >= config.total_train_steps > 0:
        yield (
            f"critic.warmup_steps is {critic.warmup_steps} with total_train_steps={config.total_train_steps}: the "
            "policy would never be trained; lower the one or raise the other"
        )
    if schedule.warmup_steps >= config.total_train_steps * critic.updates > 0:
        yield (
            f"critic.optimizer.warmup_steps is {schedule.warmup_steps} with total_train_steps="
            f"{config.total_train_steps} and critic.updates={critic.updates}: the learning rate would never reach "
            "critic.optimizer.lr; lower the one or raise the other"
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
    elif gpus > 0 and (gpus > 1 or engine.ranks > 1) and (gpus % 1 or gpus < engine.ranks):
        yield (
            f"{asked} with engine.tensor_parallel={engine.tensor_parallel} and engine.data_parallel="
            f"{engine.data_parallel}: a replica needs one whole GPU per rank, and only a replica of one rank may take "
            "a part of one; set cluster.gpus_per_replica=null"
        )
    if 0 < gpus < 1 and engine.gpu_memory_utilization > gpus:
        yield (
            f"engine.gpu_memory_utilization is {engine.gpu_memory_utilization} with {gpus:g} of a GPU for a replica "
            "(cluster.gpus_per_replica), whose rest belongs to other processes; lower it to that share or less"
        )
    if engine.nodes > 1 and gpus % engine.nodes:
        yield (
            f"{asked} with engine.nodes={engine.nodes}, of which each has as many whole GPUs; set "
            "cluster.gpus_per_replica=null, or a multiple of engine.nodes"
        )
    if engine.nodes > 1 and config.sync.route == "memory":
        yield (
            f"engine.nodes is {engine.nodes} with sync.route=memory: the trainer's shared memory is on one node; set "
            "sync.route=broadcast, or sync.route=folder sync.directory=<a directory that all nodes see>"
        )
    if config.sync.backend == "nccl" and not (gpus and cluster.gpus_per_rank):
        yield (
            f"sync.backend is nccl with {cluster.gpus_per_rank:g} GPUs per rank and {gpus:g} per replica; NCCL needs "
            "one in each; set sync.backend=gloo"
        )
    for name, given, own in (
        ("rank_env", cluster.rank_env, set(rank_environment(config.trainer))),
        ("replica_env", cluster.replica_env, own_variables(engine)),
    ):
        if taken := sorted(own & set(given)):
            yield f"cluster.{name} sets {', '.join(taken)}, which the run sets itself; leave out {taken[0]}"
    if config.sync.mode == "rolling" and config.sync.max_paused >= engine.replicas:
        yield (
            f"sync.max_paused is {config.sync.max_paused} with sync.mode=rolling and engine.replicas="
            f"{engine.replicas}: a publish may pause every replica; lower it, or set sync.mode=at_once"
        )
    if config.captures_routing and isinstance(engine, VllmConfig) and not engine.is_eager("cpu") and not gpus:
        yield (
            "engine.enforce_eager is false with trainer.router_replay=R3 on the CPU, where compiled graphs return "
            "wrong expert ids without an error; set engine.enforce_eager=true, or trainer.router_replay=none"
        )


def _teacher_problems(config: RunConfig) -> Iterator[str]:
    """What teachers cannot score, and what their term makes useless."""
    rollout, loss, distillation = config.rollout, config.loss, config.distillation
    if not config.teachers:
        if distillation != DistillationConfig():
            yield "distillation is set, which has no effect without teachers; set teachers.NAME.checkpoint, or omit it"
        return
    for name, teacher in config.teachers.items():
        engine = teacher.engine
        if not re.fullmatch(r"[A-Za-z]\w*", name):
            yield f"teachers has the name {name!r}; use letters, digits and '_', and start with a letter"
        if rollout.limits.max_tokens >= engine.max_model_len:
            yield (
                f"teachers.{name}.engine.max_model_len is {engine.max_model_len} with rollout.limits.max_tokens="
                f"{rollout.limits.max_tokens}; a teacher needs one token more to score a rollout: raise the one "
                "or lower the other"
            )
        if engine.nodes > 1:
            yield f"teachers.{name}.engine.nodes is {engine.nodes}; a replica of a teacher is on one node: set it to 1"
        if isinstance(engine, VllmConfig) and engine.speculation is not None:
            yield f"teachers.{name}.engine.speculation is set, and a teacher samples nothing; omit it"
    sampling = rollout.sampling
    if sampling.temperature != 1 or sampling.is_cut:
        yield (
            f"rollout.sampling has temperature={sampling.temperature:g}, top_p={sampling.top_p:g}, "
            f"top_k={sampling.top_k} and min_p={sampling.min_p:g} with teachers, whose logprobs are over the whole "
            "vocabulary at temperature 1, so that student and teacher would not be compared alike; leave all four at "
            "their defaults"
        )
    if loss.count == "informative":
        yield "loss.count is informative with teachers, whose term is on all tokens; set loss.count=all"
    if distillation.kl == "reverse" and distillation.top_k != DistillationConfig().top_k:
        yield (
            f"distillation.top_k is {distillation.top_k} with distillation.kl=reverse, which needs the sampled token "
            "alone; leave it out, or set distillation.kl=forward or reverse_top_k"
        )
    if not distillation.rewards and (loss.penalises_rewards or rollout.drop_without_spread):
        yield (
            f"distillation.rewards is false with loss.kl_in={loss.kl_in} and rollout.drop_without_spread="
            f"{rollout.drop_without_spread}, which are about rewards; set loss.kl_in=loss and "
            "rollout.drop_without_spread=0"
        )


def _unused_options(config: RunConfig) -> Iterator[str]:
    """Options that another option switches off. A value equal to its default is accepted."""
    failure, record, validation = config.rollout.failure, config.rollout.record, config.validation
    tracking, lora, sends = config.tracking, config.trainer.lora, config.sync.route in ("broadcast", "direct")
    probes = config.mismatch.prompts > 0
    for path, section, name, used, with_it in (
        ("staleness", config.staleness, "max_requeues", config.staleness.policy == "recycle", "staleness=recycle"),
        ("rollout.failure", failure, "max_fills", failure.on_failed == "fill", "rollout.failure.on_failed=fill"),
        ("rollout.record", record, "trajectories", record.steps > 0, "rollout.record.steps > 0"),
        ("rollout.record", record, "routing_bytes", record.steps > 0, "rollout.record.steps > 0"),
        ("validation", validation, "samples", validation.prompts > 0, "validation.prompts > 0"),
        ("validation", validation, "sampling", validation.prompts > 0, "validation.prompts > 0"),
        ("tracking", tracking, "prometheus_address", "prometheus" in tracking.trackers, "prometheus in its trackers"),
        ("trainer.lora", lora, "alpha", lora.rank > 0, "trainer.lora.rank > 0"),
        ("trainer.lora", lora, "target_modules", lora.rank > 0, "trainer.lora.rank > 0"),
        ("sync", config.sync, "directory", config.sync.route == "folder", "sync.route=folder"),
        ("sync", config.sync, "backend", sends, "sync.route=broadcast or direct"),
        ("sync", config.sync, "delta", config.sync.route == "folder", "sync.route=folder"),
        ("sync", config.sync, "max_paused", config.sync.mode == "rolling", "sync.mode=rolling"),
        ("mismatch", config.mismatch, "max_k3", probes or config.walks_versions, "mismatch.prompts > 0"),
        ("mismatch", config.mismatch, "tokens", probes, "mismatch.prompts > 0"),
        ("cluster", config.cluster, "num_cpus", config.cluster.address is None, "cluster.address=null"),
        ("cluster", config.cluster, "object_store_bytes", config.cluster.address is None, "cluster.address=null"),
    ):
        value, default = getattr(section, name), type(section).__dataclass_fields__[name].default
        if not used and value != default:
            yield f"{path}.{name} is {value}, which does nothing without {with_it}; set that, or leave it at {default}"
