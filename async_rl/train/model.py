"""How the model is trained: settings of the trainer ranks and the parallel layout. Imports nothing of megatron."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Dtype = Literal["float32", "bfloat16"]
Recompute = Literal["none", "selective", "full"]
RouterReplayMode = Literal["none", "R2", "R3"]
LayerSpec = Literal["auto", "local", "transformer_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel groups; what is left of the ranks is data parallel.

    tensor: attention heads, dense layers and the vocabulary are split; sequence parallelism comes with it.
    pipeline: layers are split. virtual_pipeline: model chunks per pipeline rank, interleaved.
    expert: experts are split over ranks that are data or context parallel (or tensor parallel, where
        expert_tensor < tensor) for the rest of the model.
    expert_tensor: each expert's weights are split; None means as `tensor`.
    context: sequences are split.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "virtual_pipeline", "expert", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"trainer.parallel.{name} is {getattr(self, name)}; must be >= 1")
        if self.expert_tensor is not None and self.expert_tensor < 1:
            raise ValueError(f"trainer.parallel.expert_tensor is {self.expert_tensor}; must be >= 1 or null")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"trainer.parallel.virtual_pipeline is {self.virtual_pipeline} with pipeline=1; "
                "interleaving needs pipeline > 1"
            )

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model and one part of each sequence."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_tensor_size(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def sequence_multiple(self) -> int:
        """Each sequence is padded to a multiple of this, so that context ranks get equal, balanced parts."""
        return 2 * self.context if self.context > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Settings of the trainer ranks.

    ranks: processes. threads: CPU threads of each. dtype: of weights and activations; optimizer state is float32.
    fp32_lm_head: logits are computed in float32 where dtype is bfloat16; an engine that samples should do the same.
    layer_spec: modules the layers are made of. local: megatron's own and this package's, on CPU and CUDA.
        transformer_engine: megatron's specification with Transformer Engine, for bfloat16 on CUDA. auto: the latter
        where it can be used.
    recompute: activations that the backward pass computes again: none, core attention, or whole layers.
    packing: tokens of a micro-batch lie end to end; off, each sequence is padded to the longest of its micro-batch.
    router_replay: R3 forces the experts the engine chose, R2 those a forward pass of the trainer chose before the
        first update of the batch, none lets the live router choose.
    replay_threshold: a recorded expert is replayed only if the router gives it at least this share of what it gives
        the weakest of its own choice; 0 replays all of them.
    micro_batch_tokens: tokens of one forward pass on one data-parallel rank; a longer sequence is alone in its own.
    updates_per_batch: optimizer steps per batch, one for each of as many mini-batches of whole prompt groups.
    aux_loss_coefficient: load-balance loss in RL; supervised_aux_loss_coefficient: the same in supervised steps.
    distributed_optimizer: split optimizer state over data-parallel ranks.
    seed: of the random state of every rank. timeout_s: bound on meeting at start and on each collective.
    """

    ranks: int = 1
    dtype: Dtype = "float32"
    fp32_lm_head: bool = False
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    layer_spec: LayerSpec = "auto"
    recompute: Recompute = "none"
    packing: bool = True
    router_replay: RouterReplayMode = "R3"
    replay_threshold: float = 0.0
    micro_batch_tokens: int = 4096
    updates_per_batch: int = 1
    threads: int = 1
    aux_loss_coefficient: float = 0.0
    supervised_aux_loss_coefficient: float = 0.01
    distributed_optimizer: bool = False
    seed: int = 0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("ranks", "micro_batch_tokens", "updates_per_batch", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} is {getattr(self, name)}; must be >= 1")
        for name in ("aux_loss_coefficient", "supervised_aux_loss_coefficient"):
            if getattr(self, name) < 0:
                raise ValueError(f"trainer.{name} is {getattr(self, name)}; must be >= 0")
        if not 0 <= self.replay_threshold <= 1:
            raise ValueError(
                f"trainer.replay_threshold is {self.replay_threshold}; must be in 0..1, 0 for no threshold"
            )
        if self.replay_threshold and self.router_replay == "none":
            raise ValueError(
                f"trainer.replay_threshold is {self.replay_threshold}, but trainer.router_replay is none; "
                "set replay_threshold=0, or replay with R2 or R3"
            )
        if self.timeout_s <= 0:
            raise ValueError(f"trainer.timeout_s is {self.timeout_s}; must be > 0")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"trainer.dtype is {self.dtype!r}; use float32 or bfloat16")
        if self.recompute not in ("none", "selective", "full"):
            raise ValueError(f"trainer.recompute is {self.recompute!r}; use none, selective or full")
        if self.layer_spec not in ("auto", "local", "transformer_engine"):
            raise ValueError(f"trainer.layer_spec is {self.layer_spec!r}; use auto, local or transformer_engine")
        if self.layer_spec == "transformer_engine" and self.dtype != "bfloat16":
            raise ValueError(
                f"trainer.layer_spec is transformer_engine with trainer.dtype={self.dtype}, for which it has "
                "no kernels for packed sequences; use dtype=bfloat16, or layer_spec=local"
            )
        if self.router_replay not in ("none", "R2", "R3"):
            raise ValueError(f"trainer.router_replay is {self.router_replay!r}; use none, R2 or R3")
        self._check_layout()

    def _check_layout(self) -> None:
        parallel = self.parallel
        if self.ranks % parallel.model_ranks:
            raise ValueError(
                f"trainer.ranks is {self.ranks}, not a multiple of tensor x pipeline x context = "
                f"{parallel.model_ranks} (trainer.parallel); add ranks or split the model less"
            )
        expert_ranks = parallel.expert * parallel.expert_tensor_size * parallel.pipeline
        if self.ranks % expert_ranks:
            raise ValueError(
                f"trainer.ranks is {self.ranks}, not a multiple of expert x expert_tensor x pipeline = {expert_ranks} "
                "(trainer.parallel); lower expert or expert_tensor, or add ranks"
            )

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences."""
        return self.ranks // self.parallel.model_ranks


def rank_environment(config: TrainerConfig) -> dict[str, str]:
    """Variables that the process of a rank must have when it starts."""
    return {"OMP_NUM_THREADS": str(config.threads)}
