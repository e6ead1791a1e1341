"""Settings of the trainer ranks and their parallel layout. This module must not import megatron."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le

from agent_loop.bounds import Count, bounded

Dtype = Literal["float32", "bfloat16"]
Recompute = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]
"""Parts of a layer that `recompute=selective` can recompute, by megatron's names."""
RouterReplayMode = Literal["none", "R2", "R3"]
PrefixSharing = Literal["auto", "off"]
LayerSpec = Literal["auto", "local", "transformer_engine"]


@bounded("trainer.parallel")
class ParallelConfig:
    """Sizes of the parallel groups. The data-parallel size is ranks / (tensor x pipeline x context).

    8 ranks with tensor=2 and pipeline=2 have a data-parallel size of 2.

    Raises:
        ValueError: a size is out of range; the message names the field.
    """

    tensor: Count = 1
    """Splits attention heads, dense layers and the vocabulary. A size above 1 includes sequence parallelism. If it is a
    multiple of the number of key-value heads, several ranks compute with the same key-value head."""
    pipeline: Count = 1
    """Splits layers, as evenly as possible; see `layers_per_stage`."""
    virtual_pipeline: Count = 1
    """Interleaved model chunks per pipeline rank."""
    expert: Count = 1
    """Splits experts over ranks that are data or context parallel for the rest of the model, or tensor parallel if
    expert_tensor < tensor."""
    expert_tensor: Count | None = None
    """Splits the weights of each expert; None for the size `tensor`."""
    context: Count = 1
    """Splits sequences."""

    def __post_init__(self) -> None:
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"trainer.parallel.virtual_pipeline is {self.virtual_pipeline} with pipeline=1; "
                "interleaving needs pipeline > 1"
            )

    @property
    def model_ranks(self) -> int:
        """Ranks per data-parallel replica."""
        return self.tensor * self.pipeline * self.context

    @property
    def close_ranks(self) -> int:
        """Consecutive ranks that exchange activations in each layer, and should share a node: those of a tensor and
        context group, or of an expert group."""
        return max(self.tensor * self.context, self.expert * self.expert_tensor_size)

    @property
    def stages(self) -> int:
        """Pipeline stages of the model; with a virtual pipeline, stage i is on pipeline rank i % pipeline."""
        return self.pipeline * self.virtual_pipeline

    def layers_per_stage(self, layers: int) -> tuple[int, ...]:
        """Split `layers` layers over the stages as evenly as possible.

        Each stage gets layers // stages layers. The remainder is one more layer for each of the last stages before the
        last one, because the first stage also computes the embedding and the last one the logits. The first stage gets
        one more layer only if all stages before the last one do.

        61 layers on 4 stages are (15, 15, 16, 15); 94 layers are (23, 24, 24, 23). 61 layers with pipeline=4 and
        virtual_pipeline=2 are (7, 7, 8, 8, 8, 8, 8, 7), so that the pipeline ranks have 15, 15, 16 and 15 layers.
        """
        each, remainder = divmod(layers, self.stages)
        last = self.stages - 1
        return tuple(each + (last - remainder <= stage < last) for stage in range(self.stages))

    def most_layers_per_rank(self, layers: int) -> int:
        """Layers of the pipeline rank that has most, with a virtual pipeline in all its stages."""
        per_stage = self.layers_per_stage(layers)
        return max(sum(per_stage[rank :: self.pipeline]) for rank in range(self.pipeline))

    @property
    def expert_tensor_size(self) -> int:
        """`expert_tensor` with its default resolved."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor


@bounded("trainer.lora")
class LoraConfig:
    """Low-rank adapters: a linear layer computes with W + alpha / rank * B A, and only A and B are trained.

    With rank=8 and alpha=16, a weight [4096, 1024] has A [8, 1024] and B [4096, 8], whose product is multiplied by 2.
    A, B and their optimizer state are float32. B starts at zero, so that the start policy is the start checkpoint.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    rank: Annotated[int, Ge(0)] = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[float, Gt(0)] = 32.0
    """The product of the adapters is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Layers with an adapter, by the last part of their names in the checkpoint: `q_proj`, `k_proj`, `v_proj`,
    `o_proj`, `gate_proj`, `up_proj`, `down_proj` (also of experts and shared experts) in most families. Empty for all
    linear layers of attention, MLP and experts. Routers, norms, embedding and output head are never adapted."""

    def __post_init__(self) -> None:
        if repeated := sorted({name for name in self.target_modules if self.target_modules.count(name) > 1}):
            raise ValueError(f"trainer.lora.target_modules has {repeated[0]} twice; name each once")


@bounded("trainer")
class TrainerConfig:
    """Settings of the trainer ranks.

    Raises:
        ValueError: a value is out of range or fields contradict each other; the message names the fields.
    """

    ranks: Count = 1
    """Processes."""
    dtype: Dtype = "float32"
    """Of weights and activations; optimizer state is float32."""
    fp32_lm_head: bool = False
    """Compute logits in float32 if dtype is bfloat16; the engine should do the same."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Parallel layout."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters, trained instead of the weights."""
    layer_spec: LayerSpec = "auto"
    """`local`: modules of megatron and this package, for CPU and CUDA. `transformer_engine`: megatron's spec with
    Transformer Engine, for bfloat16 on CUDA. `auto`: transformer_engine if it can be used, and without LoRA, else
    local."""
    recompute: Recompute = "none"
    """Activations that the backward pass recomputes: none, those of parts of each layer (selective), or of whole layers
    (full)."""
    recompute_modules: list[RecomputeModule] = field(default_factory=lambda: ["core_attn"])
    """Parts that `selective` recomputes: core_attn is the attention between its projections (fused kernels keep
    little); mlp is that of dense layers; moe is the router with all experts; moe_act is the activation between the
    two matrices of the experts."""
    offload_activations: bool = False
    """With `recompute=full`: the inputs of the layers wait in pinned host memory for the backward pass."""
    packing: bool = True
    """Concatenate the sequences of a micro-batch; otherwise each is padded to the longest of its micro-batch."""
    prefix_sharing: PrefixSharing = "auto"
    """`auto`: the sequences of a micro-batch share the computation of common prefixes, where `shares_prefixes` is true;
    `off`: each is computed from its first token."""
    router_replay: RouterReplayMode = "R3"
    """R3 forces the experts that the engine chose, R2 the experts that a forward pass of the trainer chose before the
    first update of the batch; with `none` the live router chooses."""
    replay_threshold: Annotated[float, Ge(0), Le(1)] = 0.0
    """A recorded expert is replayed only if its router probability is at least this times the lowest probability in the
    router's own top-k; 0 replays all recorded experts."""
    micro_batch_tokens: Count = 4096
    """Tokens of a forward pass per data-parallel and context-parallel rank. A longer sequence is a micro-batch."""
    updates_per_batch: Count = 1
    """Optimizer steps per batch. The prompt groups of a batch are split into this many mini-batches."""
    threads: Count | None = None
    """CPU threads per rank; null is its share of the cores that it may use: by the GPUs of its node, or by the ranks if
    they train on CPUs."""
    aux_loss_coefficient: Annotated[float, Ge(0)] = 0.0
    """Factor of the load-balance loss in RL."""
    supervised_aux_loss_coefficient: Annotated[float, Ge(0)] = 0.01
    """Factor of the load-balance loss in supervised steps."""
    distributed_optimizer: bool = False
    """Split optimizer state over data-parallel ranks."""
    seed: int = 0
    """Of the random state of every rank."""
    peak_flops: Annotated[float, Gt(0)] | None = None
    """Most floating-point operations per second of a GPU, for the metric `throughput/mfu`; null for the dense bfloat16
    rate of NVIDIA's data sheet. It is known for bfloat16 training on common GPUs; else the metric is absent."""
    timeout_s: Annotated[float, Gt(0)] = 300.0
    """Seconds; bound on the rendezvous and on each collective."""

    def __post_init__(self) -> None:
        if self.replay_threshold and self.router_replay == "none":
            raise ValueError(
                f"trainer.replay_threshold is {self.replay_threshold}, but trainer.router_replay is none; "
                "set replay_threshold=0, or replay with R2 or R3"
            )
        if unknown := sorted(set(self.recompute_modules) - set(get_args(RecomputeModule))):
            raise ValueError(
                f"trainer.recompute_modules has {', '.join(unknown)}; use {', '.join(get_args(RecomputeModule))}"
            )
        if {"moe", "moe_act"} <= set(self.recompute_modules):
            raise ValueError("trainer.recompute_modules has moe and moe_act, which is a part of it; leave out one")
        if self.offload_activations and self.recompute != "full":
            raise ValueError(
                f"trainer.offload_activations is true with trainer.recompute={self.recompute}, so that all activations "
                "of each layer would be copied; set recompute=full"
            )
        if self.layer_spec == "transformer_engine" and self.dtype != "bfloat16":
            raise ValueError(
                f"trainer.layer_spec is transformer_engine with trainer.dtype={self.dtype}, for which it has "
                "no kernels for packed sequences; use dtype=bfloat16, or layer_spec=local"
            )
        if self.layer_spec == "transformer_engine" and self.lora.rank:
            raise ValueError(
                f"trainer.layer_spec is transformer_engine with trainer.lora.rank={self.lora.rank}, but adapters are "
                "merged in the layers of the local spec only; use layer_spec=auto or local, or lora.rank=0"
            )
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
    def shares_prefixes(self) -> bool:
        """Whether sequences share the computation of common prefixes.

        They do not if rows are padded, if a load-balance loss counts each token, or if Transformer Engine may pass keys
        around context ranks.
        """
        ring = self.parallel.context > 1 and self.dtype == "bfloat16" and not self.lora.rank
        return (
            self.prefix_sharing == "auto"
            and self.packing
            and not self.aux_loss_coefficient
            and not (ring and self.layer_spec != "local")
        )

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences."""
        return self.ranks // self.parallel.model_ranks

    @property
    def sums_gradients(self) -> bool:
        """Whether several ranks have the same weights, dense ones or those of experts, and sum their gradients.

        2 ranks with tensor=2 and expert_tensor=1 have the same experts.
        """
        parallel = self.parallel
        dense, expert = parallel.tensor, parallel.expert * parallel.expert_tensor_size
        return self.ranks // (min(dense, expert) * parallel.pipeline) > 1


def rank_environment(config: TrainerConfig) -> dict[str, str]:
    """Environment variables that must be set when the process of a rank starts."""
    variables = {
        "OMP_NUM_THREADS": str(config.threads or 1),  # torch's threads are set in the process
        "GOMP_SPINCOUNT": "5000",  # an idle thread soon leaves its core to an engine next to it; default: 300,000
    }
    if max(config.parallel.tensor, config.parallel.context) > 1:
        # A GPU then starts kernels in the order of their launch; megatron needs this so that exchanges overlap.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return variables
