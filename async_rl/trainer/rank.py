"""One trainer process: it has a part of the model and trains it on batches."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor

from agent_loop.timeline import Timeline
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.critic.config import CriticConfig
from async_rl.trainer.critic.critic import Critic
from async_rl.trainer.distributed import ProcessGroups
from async_rl.trainer.export import VersionWriter, adapter_folder, export_adapter, save_on_first_rank
from async_rl.trainer.forward_backward import ForwardBackward
from async_rl.trainer.kl_reward import penalise_rewards
from async_rl.trainer.loss.distillation import DistillationConfig, sum_names
from async_rl.trainer.loss.losses import LossConfig
from async_rl.trainer.loss.reference import ReferenceWeights
from async_rl.trainer.metrics import OLD_COLUMNS, TokenSums, routing_metrics, routing_sums, tree_metrics
from async_rl.trainer.model.convert import load_weights
from async_rl.trainer.model.flops import pair_cost, peak_of, train_operations
from async_rl.trainer.model.gpt import BuiltModel, build_model
from async_rl.trainer.model.model import RouterReplayMode, TrainerConfig
from async_rl.trainer.model.source import WeightSource
from async_rl.trainer.old_policy.old_policy import OldPolicy, OldPolicyConfig, Walked
from async_rl.trainer.planning import BatchPlan, Planner, UpdatePlan
from async_rl.trainer.recording import RolloutRecorder, recorded_values
from async_rl.trainer.state.adam import Optimizer
from async_rl.trainer.state.checkpoint import (
    Manifest,
    copy_state,
    fields_of,
    load_state,
    read_manifest,
    require_same,
    write_state,
)
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.trainer.state.shards import copy_into, live_tensors, model_shards
from async_rl.trainer.step import MicroBatchBuilder, MicroBatches, MicroBatchResults, Objective
from async_rl.weights.model_info import read_model_info
from async_rl.weights.pretrained import save_pretrained
from async_rl.weights.transport import Backend, WeightUpdate, remove_directory

_TRIM_THRESHOLD, _MAX_MAPPED_BLOCKS = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's malloc.h


def _reuse_freed_memory() -> None:
    """Keep freed blocks of all sizes in the process, if its C library is glibc.

    Otherwise glibc returns a block of 32 MiB or more to the system, and each new tensor of this size on the CPU costs
    a page fault for every 4 KiB: up to a tenth of a train step.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MAX_MAPPED_BLOCKS, 0)
        mallopt(_TRIM_THRESHOLD, -1)


def threads_of(config: TrainerConfig) -> int:
    """CPU threads of a rank in this process."""
    if config.threads is not None:
        return config.threads
    gpus = len([*Path("/dev").glob("nvidia[0-9]*")])  # also those that Ray hides from this process
    return max(1, len(os.sched_getaffinity(0)) // (gpus or config.ranks))


class TrainerRank:
    """A rank of the trainer. All methods are collective: all ranks call them with the same arguments.

    Args:
        config: settings of the ranks.
        optimizer: optimizer and learning-rate schedule.
        loss: the policy loss.
        checkpoint: Hugging Face folder with config and initial weights.
        rank: number of this process.
        world_size: number of ranks.
        rendezvous: host:port of the store of the ranks; None for a single rank.
        delta: publish most versions as changes of the version before; takes the memory of the weights that a rank owns.
        host: address of this node, if versions stay in its memory and are served from there (`sync.route=broadcast` or
            `direct`).
        direct: backend by which engines receive versions from the memory of this rank; None with other routes.
        old_policy: how old logprobs are computed; None if they are not.
        critic: the value model of advantage.name=gae; None with other advantages.
        recorder: writes the recorded groups of each batch; None on all ranks but the first.
        teaches: the term of the teachers; None without any.

    Attributes:
        model: this rank's part of the model; gradients remain in `main_grad` until the next update.
        data_rank: rank in the data-parallel group; it determines the sequences of this rank.
        records: whether this rank writes the recorded groups of a batch.
        timeline: time spans of this rank. On a GPU they end when the host continues, not when the kernels have ended.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        ValueError: the model cannot be split into the parallel layout.
    """

    def __init__(
        self,
        *,
        config: TrainerConfig,
        optimizer: OptimizerConfig,
        loss: LossConfig,
        checkpoint: Path,
        rank: int,
        world_size: int,
        rendezvous: str | None = None,
        delta: bool = False,
        host: str | None = None,
        direct: Backend | None = None,
        old_policy: OldPolicyConfig | None = None,
        critic: CriticConfig | None = None,
        recorder: RolloutRecorder | None = None,
        teaches: DistillationConfig | None = None,
    ) -> None:
        torch.set_num_threads(threads_of(config))
        _reuse_freed_memory()
        self.timeline = Timeline("rank")
        self._config = config
        self._loss = loss
        self._recorder, self.records = recorder, recorder is not None
        self._info = read_model_info(checkpoint)
        self._groups = ProcessGroups(config, rank=rank, world_size=world_size, rendezvous=rendezvous)
        self.data_rank = self._groups.data_rank
        self.model: BuiltModel = build_model(checkpoint, config=config, device=self._groups.device)
        load_weights(self.model.chunks, checkpoint, shape=self.model.shape)
        self._start = checkpoint
        self._serves = host is not None
        self._model_fields = fields_of(self.model.shape, config=config, start=checkpoint)
        self._optimizer = Optimizer(self.model.wrapped, config=optimizer, trainer=config)
        self._reference = ReferenceWeights(self.model.chunks) if loss.kl_coefficient > 0 else None
        self._snapshot: ReferenceWeights | None = None  # weights of `score`
        source = WeightSource(self.model.chunks, shape=self.model.shape)
        self._versions = VersionWriter(source, self._groups, delta=delta, host=host, direct=direct)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._teaches = teaches
        self._planner = Planner(
            config=config,
            loss=loss,
            walks=old_policy is not None,
            pair_cost=pair_cost(self.model.shape),
            teaches=teaches is not None,
        )
        self._forward_backward = ForwardBackward(
            config=config, loss=loss, groups=self._groups, model=self.model, teaches=teaches
        )
        passes, build = self._forward_backward, self._micro_batches
        self._old = old_policy and OldPolicy(old_policy, passes=passes, micro_batches=build, routing=self._info.routing)
        self._critic = critic and Critic(critic, passes=passes, micro_batches=build, start=checkpoint)

    # ---- training

    def train(self, batch: TrainingBatch | BatchPlan) -> dict[str, float]:
        """Run one optimizer update per mini-batch of an RL batch and return the metrics of the batch.

        The proximal logprobs, and the routing that R2 replays, are computed with the weights before the first update. A
        mini-batch without gradients counts as an update. The reference of a KL term has the weights of the start or of
        the last `reset_optimizer`, and its own routing.

        Args:
            batch: with the content of all groups, or a plan with the content of the groups that this rank needs.

        Raises:
            BatchError: router replay is on, and the routing rows do not fit the model or the batch; or loss.kl_in is
                reward, and the batch has no rewards.
            FloatingPointError: the gradient of an update is not finite; previous updates of the batch remain.
            MismatchError: a replica served other weights than it said; the weights are unchanged.
            RecordingError: the recorded groups of the batch before could not be written.
        """
        plan = self._planner.policy(batch) if isinstance(batch, TrainingBatch) else batch
        with self.timeline.span("build") as span:
            planned = [self._micro_batches(plan.batch, update) for update in plan.updates if update is not None]
            span.args["micro_batches"] = sum(map(len, planned))
        plan, walked, penalty = self._prepare(plan, planned)
        trained, steps, verified = iter(planned), list[tuple[float, float]](), dict[str, float]()
        for number, each in enumerate(plan.updates):
            if each is None:
                if self._old is not None and planned and not number:
                    verified = self._old.verify(plan, walked, None)
                steps.append((0.0, self._optimizer.skip()))
                if self._critic is not None:
                    self._critic.skip()
                continue
            micro_batches = next(trained)
            objective = self._forward_backward.policy_objective(micro_batches)
            if self._critic is not None:
                objective = self._critic.objective(each, objective)
            self._forward_and_backward(micro_batches, objective, self._config.aux_loss_coefficient)
            if self._old is not None and not number:
                verified = self._old.verify(plan, walked, micro_batches)
            steps.append(self._step(critic_update=each))
        with self.timeline.span("record"):
            self._record(plan, planned)
        results = [of_one for micro_batches in planned for of_one in micro_batches.results]
        of_critic = {} if self._critic is None else self._critic.metrics()
        return self._metrics(results, steps, trajectories=plan.batch.num_trajectories) | penalty | verified | of_critic

    def _prepare(self, plan: BatchPlan, planned: Sequence[MicroBatches]) -> tuple[BatchPlan, Walked, dict[str, float]]:
        """Run the passes before the first update: those of old policy, reference, proximal policy and critic.

        Returns:
            The plan, with other advantages if the ranks compute them; the old logprobs; metrics of a KL in the reward.
        """
        walked: Walked = {}
        if self._old is not None:
            with self.timeline.span("old_policy", versions=len(plan.walk)):
                walked = self._old.walk(plan, planned)
        if self._reference is not None:
            with self.timeline.span("reference"):
                for micro_batches in planned:
                    self._forward_backward.reference(micro_batches, self._reference)
        if self._forward_backward.needs_proximal:
            with self.timeline.span("proximal"):
                for micro_batches in planned:
                    self._forward_backward.proximal(micro_batches)
        if self._critic is not None:
            with self.timeline.span("values"):
                plan, penalty = self._critic.value(plan, planned)
        elif self._loss.penalises_rewards:
            plan, penalty = penalise_rewards(plan, planned, passes=self._forward_backward)
        else:
            penalty = dict[str, float]()
        return plan, walked, penalty

    def throughput(self, plan: BatchPlan, *, seconds: float) -> dict[str, float]:
        """Metrics of the speed of `train`: TFLOP/s of a rank, and their share of the peak if that is known.

        The metrics of `train` have neither, because they are equal when a step is repeated.

        Args:
            plan: batch that was trained; without gradient it has no speed.
            seconds: duration of the call.
        """
        updates = [update for update in plan.updates if update is not None]
        if not updates:
            return {}
        runs = np.concatenate([update.runs for update in updates])
        operations = train_operations(
            self.model.shape,
            runs,
            num_loss_tokens=sum(update.num_loss_tokens for update in updates),
            lora=self._config.lora,
        )
        if self._critic is not None:
            operations += self._critic.operations(runs)
        rate = operations / seconds / self._config.ranks
        peak, device = self._config.peak_flops, self._groups.device
        if peak is None and device.type == "cuda" and self._config.dtype == "bfloat16":
            peak = peak_of(torch.cuda.get_device_name(device))
        return {"throughput/train_tflops": rate / 1e12} | ({} if peak is None else {"throughput/mfu": rate / peak})

    def train_supervised(self, batch: TrainingBatch | BatchPlan) -> dict[str, float]:
        """Run one update on the mean cross entropy of the tokens in the loss.

        Returns:
            loss (nat), tokens, grad_norm, lr.

        Raises:
            FloatingPointError: the gradient is not finite; the weights are unchanged.
        """
        plan = self._planner.supervised(batch) if isinstance(batch, TrainingBatch) else batch
        (update,) = plan.updates
        assert update is not None
        micro_batches = self._micro_batches(plan.batch, update, replay="none")
        objective = self._forward_backward.objective("supervised")
        self._forward_and_backward(micro_batches, objective, self._config.supervised_aux_loss_coefficient)
        grad_norm, lr = self._step()
        counted = micro_batches.results if self._forward_backward.counts_tokens else []
        here = [sum(float(results.sums[name]) for results in counted) for name in ("loss", "tokens")]
        sums = self._groups.sum_over_ranks(torch.tensor(here, dtype=torch.float64))
        return {"loss": sums[0].item(), "tokens": sums[1].item(), "grad_norm": grad_norm, "lr": lr}

    def logprobs(self, batch: TrainingBatch) -> list[Tensor]:
        """Logprobs float32 [n] of the tokens in the loss of each sequence, under the current weights.

        Routing is replayed as in `train`.
        """
        plan = self._planner.whole(batch)
        (update,) = plan.updates
        assert update is not None
        micro_batches = self._micro_batches(batch, update)
        found = self._forward_backward.of_update(micro_batches, self._forward_backward.logprobs(micro_batches))
        return list(found.to(torch.float32).split(batch.num_loss_tokens.tolist()))

    def snapshot_weights(self) -> None:
        """Copy the current weights for `score`, until the next call."""
        self._snapshot = None  # frees its memory
        self._snapshot = ReferenceWeights(self.model.chunks)

    def score(self, batch: TrainingBatch) -> list[Tensor]:
        """As `logprobs`, under the weights of the last `snapshot_weights`, or the current weights if there was none."""
        if self._snapshot is None:
            return self.logprobs(batch)
        with self._snapshot.loaded():
            return self.logprobs(batch)

    # ---- weights and state

    def export(self, directory: Path | str, *, version: int, keep_version: int = 0) -> WeightUpdate | None:
        """Write the current weights for engines; see `async_rl.trainer.export.VersionWriter.write`."""
        with self.timeline.span("export", version=version):
            return self._versions.write(directory, version=version, keep_version=keep_version)

    def remove_updates(self, directory: Path | str) -> None:
        """Remove `directory` with all versions, on the machine of rank 0, or on those of all ranks if they serve it."""
        if dist.get_rank() == 0 or self._serves:
            remove_directory(directory)

    def save_pretrained(self, folder: Path, *, like: Path) -> None:
        """Write the current weights as a Hugging Face checkpoint; see `async_rl.weights.pretrained.save_pretrained`.

        With LoRA these are the merged weights, and the adapters alone are written next to them, into `folder`-adapter.
        """
        save_on_first_rank(self._versions.source, partial(save_pretrained, folder, like=like))
        if self._config.lora.rank:
            export_adapter(self.model, adapter_folder(folder), config=self._config.lora, start=self._start)

    def save(self, directory: Path) -> Future[None]:
        """Copy model, optimizer, schedule and random state, and write them in a thread as folder `directory`.

        The folder appears when all its files are on the disk. The rollouts recorded so far are on the disk before.

        Returns:
            Ends when the folder is written, or with OSError as below. The rank may train until then.

        Raises:
            OSError: the disk has no free space or is not writable; an existing checkpoint is unchanged.
            RecordingError: recorded rollouts could not be written.
        """
        if self._recorder is not None:
            self._recorder.flush()
        manifest = Manifest(
            model=self._model_fields,
            layout=self._layout(),
            updates=self._optimizer.updates,
            steps=self._optimizer.steps,
            reference=self._reference is not None,
            versions=self._old is not None,
            start=str(self._start) if self._config.lora.rank else None,
            critic=self._critic and self._critic.saved(),
        )
        with self.timeline.span("checkpoint"):
            if self._old is not None:
                self._old.store.add(self._optimizer.updates)
            state = self._state(loading=False, reference=manifest.reference, random=True)
            state |= {} if self._old is None else self._old.state()
            state |= {} if self._critic is None else {"critic": self._critic.state(loading=False)}
            shards = copy_state(directory, state, ranks=self._groups)
        return self._writer.submit(write_state, directory, shards, manifest=manifest, ranks=self._groups)

    def restore(self, directory: Path) -> None:
        """Restore the state that `save` wrote, also in another parallel layout.

        In the same layout training continues exactly as without a restart. In another layout, sums have another order,
        and the random state is reset from trainer.seed + number of updates. If the folder has no critic, that of this
        rank starts over, as after `reset_optimizer`; a critic of the folder is left out if this rank has none.

        Raises:
            TrainerCheckpointError: the folder does not exist, is damaged, or has another format, model or critic.
        """
        manifest = read_manifest(directory, model=self._model_fields, ranks=self._groups)
        same_layout = manifest.layout == self._layout()
        reference = manifest.reference and self._reference is not None
        weights = live_tensors(self._weight_shards())
        given = self._state(loading=True, reference=reference, random=same_layout)
        if self._old is not None and manifest.versions and same_layout:
            given |= self._old.state()
        if self._critic is not None and manifest.critic is not None:
            require_same(directory, manifest.critic.model, self._critic.fields, what="critic")
            given["critic"] = self._critic.state(loading=True)
        state = load_state(directory, given)
        copy_into(weights, state["model"])
        self._optimizer.load(state.get("optimizer", {}), updates=manifest.updates, steps=manifest.steps)
        if self._reference is not None and reference:
            copy_into({name: self._reference.frozen(w) for name, w in weights.items()}, state["reference"])
        if self._old is not None:
            self._old.store.restore(manifest.updates, *state.get("versions", ()))
        if self._critic is not None:
            self._critic.restore(state.get("critic", {}), manifest.critic)
        if same_layout:
            self._groups.set_random_state(state["random"])
        else:
            self._groups.reseed(self._config.seed + manifest.updates)
        self._groups.barrier()

    def forget_versions(self, first: int, last: int) -> None:
        """Take the weights of `first` to `last` optimizer updates as unknown: engines may have served others."""
        if self._old is not None:
            self._old.store.forget(range(first, last + 1))

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Replace the optimizer: zero moments, schedule at update 0. The reference becomes the current weights, and so
        does the critic, unless it has a checkpoint."""
        self._optimizer = Optimizer(self.model.wrapped, config=optimizer, trainer=self._config)
        if self._reference is not None:
            self._reference = ReferenceWeights(self.model.chunks)
        if self._old is not None:
            self._old.store.restore(0)
        if self._critic is not None:
            self._critic.reset()

    def close(self) -> None:
        """Leave the process groups, when recorded rollouts and the last checkpoint are on the disk."""
        self._writer.shutdown()
        if self._recorder is not None:
            self._recorder.flush()
        self._versions.close()
        self._groups.close()

    # ---- inside

    def _micro_batches(
        self,
        batch: TrainingBatch,
        update: UpdatePlan,
        *,
        replay: RouterReplayMode | None = None,
        trunk: BuiltModel | None = None,
    ) -> MicroBatches:
        """Micro-batches of this rank for `update`.

        Args:
            batch: with the content that this rank needs.
            update: a part of its plan.
            replay: kind of router replay of a supervised step, whose load-balance loss counts each token; None for the
                configured one.
            trunk: model of the critic, which replays rows of the batch alone; None for the policy.
        """
        model, shares = trunk or self.model, self._config.shares_prefixes and replay is None
        replay = replay or self._config.router_replay
        replays = model.replay is not None and (trunk is None or replay == "R3")
        builder = MicroBatchBuilder(
            batch,
            update,
            at=self._groups.coordinates,
            device=self._groups.device,
            packing=self._config.packing,
            shares_prefixes=shares,
            replay=replay if replays else "none",
            routing=self._info.routing,
            teaches=self._teaches,
            layers=model.replay.layers if model.replay is not None else (),
            rotary=model.rotary,
            earlier=model.shape.convolved_rows,
        )
        return MicroBatches(builder, update.micro_batches[self.data_rank])

    def _record(self, plan: BatchPlan, planned: Sequence[MicroBatches]) -> None:
        """Start to write the recorded groups of a batch, on the rank that has the recorder."""
        if not plan.batch.recorded.heads:
            return
        values = recorded_values(plan.batch, planned, passes=self._forward_backward)
        if self._recorder is not None:
            routing = self._info.routing
            self._recorder.write(plan.batch, values, moe_layers=() if routing is None else routing.layers)

    def _forward_and_backward(
        self, micro_batches: MicroBatches, objective: Objective, aux_loss_coefficient: float
    ) -> None:
        # Megatron multiplies the loss of a micro-batch by its tokens.
        self.model.config.moe_aux_loss_coeff = aux_loss_coefficient / max(1, micro_batches.update.num_tokens)
        self._optimizer.zero_grad()
        with self.timeline.span("forward_backward", micro_batches=len(micro_batches)):
            self._forward_backward.train(micro_batches, objective)

    def _step(self, *, critic_update: UpdatePlan | None = None) -> tuple[float, float]:
        """Optimizer update, skipped while a critic warms up; returns (gradient norm, learning rate).

        Args:
            critic_update: mini-batch for the critic, if there is one.
        """
        warms_up = False
        if self._critic is not None and critic_update is not None:
            warms_up = self._critic.warms_up
            with self.timeline.span("critic"):
                self._critic.update(critic_update)
        with self.timeline.span("optimizer"):
            return (0.0, self._optimizer.skip()) if warms_up else self._optimizer.step()

    def _metrics(
        self, results: Sequence[MicroBatchResults], steps: Sequence[tuple[float, float]], *, trajectories: int
    ) -> dict[str, float]:
        """Metrics over all ranks for updates with `steps` (gradient norm, learning rate)."""
        kl = ("kl",) if self._loss.kl_coefficient > 0 else ()
        extra = (*self._loss.filters, *kl, *sum_names(self._teaches), *(() if self._old is None else OLD_COLUMNS))
        sums = TokenSums(extra, trajectories=trajectories)
        for of_one in results if self._forward_backward.counts_tokens else ():
            sums.add(of_one.sums, trajectories=of_one.trajectories)
        sums.reduce(self._groups.sum_over_ranks, partial(self._groups.sum_over_ranks, op=dist.ReduceOp.MAX))
        routing = self._info.routing
        layers = () if routing is None or self._config.router_replay == "none" else routing.layers
        routed = routing_sums([of_one.routing_sums for of_one in results], layers=layers)
        counted = [of_one.num_rows for of_one in results if self._forward_backward.counts_tokens]
        rows = self._groups.sum_over_ranks(torch.tensor([(0, 0), *counted], dtype=torch.float64).sum(0))
        grad_norms, lrs = zip(*steps, strict=True)
        return {
            **sums.metrics(updates=len(steps)),
            **routing_metrics(self._groups.sum_over_ranks(routed), layers=layers),
            **tree_metrics(*rows.tolist()),
            "grad_norm": max(grad_norms),
            "lr": lrs[-1],
        }

    def _state(self, *, loading: bool, reference: bool, random: bool) -> dict[str, Any]:
        """Content of a checkpoint as nested shards."""
        weights = self._weight_shards()
        state: dict[str, Any] = {"model": weights}
        if optimizer := self._optimizer.shards(weights, loading=loading):
            state["optimizer"] = optimizer  # if empty, another rank writes it for this rank
        if self._reference is not None and reference:
            state["reference"] = {
                name: make_sharded_optimizer_tensor(weights[name], self._reference.frozen(tensor), "reference")
                for name, tensor in live_tensors(weights).items()
            }
        if random:
            ranks, rank = (self._groups.size,), (self._groups.rank,)
            state["random"] = ShardedObject("random", self._groups.random_state(), ranks, rank)
        return state

    def _weight_shards(self) -> dict[str, Any]:
        """Shards of the weights in a checkpoint."""
        return model_shards(self.model.chunks, lora=self._config.lora.rank > 0)

    def _layout(self) -> dict[str, int]:
        parallel = self._config.parallel
        return {"ranks": self._config.ranks, **asdict(parallel), "expert_tensor": parallel.expert_tensor_size}
