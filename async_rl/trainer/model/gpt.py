"""Builds megatron's GPTModel from a Hugging Face config, wrapped for data parallelism. Weights are not loaded here."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from async_rl.trainer.distributed import expert_tensor_group, tensor_group
from async_rl.trainer.loss.logprobs import OutputLayer
from async_rl.trainer.model.attention import Rotary
from async_rl.trainer.model.delta_net import keep_decay_rates_float32
from async_rl.trainer.model.families import ModelShape, read_shape
from async_rl.trainer.model.layers import is_expert, layer_specs, local_name, split_dimension, uses_transformer_engine
from async_rl.trainer.model.layout import layout_problems
from async_rl.trainer.model.lora import add_adapters
from async_rl.trainer.model.model import ParallelConfig, TrainerConfig
from async_rl.trainer.router_replay import RouterReplay


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltModel:
    """This rank's part of the model."""

    shape: ModelShape
    """Properties from the Hugging Face config."""
    config: TransformerConfig
    """Megatron's config."""
    chunks: Sequence[GPTModel]
    """One per virtual pipeline stage."""
    wrapped: Sequence[DistributedDataParallel]
    """The same chunks with bfloat16 conversion and data parallelism, for megatron's schedules."""
    rotary: Rotary
    """Rotary angles."""
    replay: RouterReplay | None
    """Router replay hooks; None for a dense model."""

    @property
    def for_schedule(self) -> Any:
        """The `model` argument of megatron's schedules: a list only with a virtual pipeline."""
        return list(self.wrapped) if len(self.wrapped) > 1 else self.wrapped[0]

    def output_layer(self, *, float32: bool) -> OutputLayer | None:
        """The output layer; None before the last pipeline stage, and of a model without one.

        bfloat16 rounds a logit of 16 by up to 0.06, and a logprob then has this error (MiniMax-M1, arXiv
        2506.13585).

        Args:
            float32: whether logits are computed in float32. The weight and its gradient keep their dtype.
        """
        chunk: Any = self.chunks[-1]
        if not chunk.post_process or isinstance(chunk.output_layer, _NoOutputLayer):
            return None
        tied = chunk.share_embeddings_and_output_weights
        weight: Tensor = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
        group = tensor_group()
        return OutputLayer(
            weight=weight,
            num_ids=max(0, min(len(weight), self.shape.vocab_size - group.rank() * len(weight))),
            dtype=torch.float32 if float32 else weight.dtype,
            group=group,
        )

    def release_graph(self) -> None:
        """Drop references to the autograd graph of the last forward pass.

        Megatron's token dispatchers keep gate weights with their graph. The graph references the gradient hooks of the
        parameters and thereby the model. A part of this cycle is in C++, where Python's garbage collector cannot find
        it, so that neither the model nor its process groups would be freed.
        """
        for chunk in self.chunks:
            for layer in chunk.decoder.layers:
                dispatcher = getattr(layer.mlp, "token_dispatcher", None)
                for name, value in list(vars(dispatcher).items()) if dispatcher is not None else ():
                    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                        setattr(dispatcher, name, None)


def build_model(
    checkpoint: Path, *, config: TrainerConfig, device: torch.device, output_layer: bool = True
) -> BuiltModel:
    """Build this rank's part of the model; its weights are undefined until they are loaded.

    Args:
        checkpoint: Hugging Face folder with the config.
        config: settings of the trainer.
        device: device of this rank.
        output_layer: whether the model has one; else it ends with the last hidden states.

    Raises:
        CheckpointError: the trainer does not support the model.
        ValueError: the model cannot be split into the parallel layout; the message names the field.
    """
    shape = read_shape(checkpoint)
    if problems := list(layout_problems(shape, config)):
        raise ValueError("\n".join(problems))
    engine = uses_transformer_engine(config, device=device) and not _is_local_only(shape)
    with warnings.catch_warnings():
        # Megatron warns that recomputing core attention is useless with fused kernels; it is the user's choice.
        warnings.filterwarnings("ignore", message="If you are using transformer_engine", category=UserWarning)
        megatron = _megatron_config(shape, config, device)
    interleaved = config.parallel.virtual_pipeline > 1
    stages = range(config.parallel.virtual_pipeline) if interleaved else [None]
    settings: Any = {"transformer_engine": engine, "output_layer": output_layer}
    chunks = [_build_chunk(megatron, shape, config, stage, **settings).to(device) for stage in stages]
    moe = bool(shape.megatron.get("num_moe_experts"))
    replay = RouterReplay(chunks, threshold=config.replay_threshold) if moe else None
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.distributed_optimizer,
        overlap_grad_reduce=config.sums_gradients,
        check_for_nan_in_grad=False,  # the optimizer step refuses a gradient norm that is not finite
    )
    inner = [Float16Module(megatron, chunk) if config.dtype == "bfloat16" else chunk for chunk in chunks]
    for chunk in chunks:
        keep_decay_rates_float32(chunk)
    if config.lora.rank:  # after the conversion to bfloat16, because adapters are float32
        add_adapters(chunks, config=config.lora, shape=shape, seed=config.seed)
    wrapped = [
        DistributedDataParallel(megatron, data_parallel, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(inner)
    ]
    if config.sums_gradients:  # until the last micro-batch, gradients are added up on each rank
        no_sync: Any = [chunk.no_sync for chunk in wrapped]
        megatron.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    _freeze_expert_bias(megatron, chunks)
    rotary = Rotary(shape.rope.frequencies(), amplitude=shape.rope.amplitude, length=shape.context_length)
    return BuiltModel(shape=shape, config=megatron, chunks=chunks, wrapped=wrapped, rotary=rotary, replay=replay)


def _is_local_only(shape: ModelShape) -> bool:
    """Whether Transformer Engine's spec lacks parts of the model."""
    return shape.family.local_only or shape.convolved_rows is not None


def _build_chunk(
    megatron: TransformerConfig,
    shape: ModelShape,
    config: TrainerConfig,
    stage: int | None,
    *,
    transformer_engine: bool,
    output_layer: bool,
) -> GPTModel:
    chunk = GPTModel(
        megatron,
        layer_specs(
            megatron,
            stage=stage,
            transformer_engine=transformer_engine,
            norms_all_heads=shape.family.norms_all_heads,
        ),
        vocab_size=math.ceil(shape.vocab_size / config.parallel.tensor) * config.parallel.tensor,
        max_sequence_length=shape.context_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        position_embedding_type="none",  # RowAttention rotates
        share_embeddings_and_output_weights=shape.tied and output_layer,
        vp_stage=stage,
    )
    if chunk.post_process and not output_layer:
        cast(Any, chunk).output_layer = _NoOutputLayer(sequence_parallel=megatron.sequence_parallel)
    _mark_weights(chunk)
    _return_hidden_states(chunk)
    return chunk


def _mark_weights(chunk: GPTModel) -> None:
    """Mark on each weight which dimension tensor parallelism splits, and whether it belongs to an expert.

    Megatron marks the dimension only when it draws initial weights. Transformer Engine marks dimension 0 on every
    weight that it does not split itself, including experts. Megatron marks experts only with expert parallelism;
    without the mark and with expert_tensor != tensor, the gradients of experts would be summed over the wrong ranks.

    The gradient norm counts a weight without `tensor_model_parallel` on the first tensor-parallel rank only. The ranks
    of an expert are other ones, so that copies of a bias on them are marked as shared instead.
    """
    for full_name, parameter in chunk.named_parameters():
        name, weight = local_name(full_name), cast(Any, parameter)
        dimension = split_dimension(name, parameter)
        weight.tensor_model_parallel = is_expert(name) or dimension is not None
        weight.partition_dim, weight.partition_stride = -1 if dimension is None else dimension, 1
        if is_expert(name):
            weight.allreduce = False
            weight.shared = dimension is None and expert_tensor_group().rank() > 0


def _freeze_expert_bias(megatron: TransformerConfig, chunks: Sequence[GPTModel]) -> None:
    """Keep the routers' correction biases constant, in float32.

    Megatron would change them after every update, by the number of tokens per expert. Under replay these numbers are
    choices of older weights, and a changed bias would change the routing in the engines without any gradient.
    """
    megatron.moe_router_enable_expert_bias = False  # read when gradients are finalized; the scores still use the bias
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is not None and router.expert_bias is not None:
                router.enable_expert_bias = False
                router._maintain_float32_expert_bias()  # pyright: ignore[reportPrivateUsage]


def fusions(shape: ModelShape, device: torch.device) -> dict[str, bool]:
    """Fused kernels of megatron on a device: its settings by name. On a CPU SwiGLU is not compiled, and slower.

    Not used: moe_router_fusion, which bypasses router replay, and cross_entropy_loss_fusion, because the loss is a
    function of logprobs and entropies. With overlap_param_gather a publish would wait for the gather. The token
    dispatcher allgather does not take micro-batches of different sizes over a pipeline, and flex needs DeepEP.
    """
    on_gpu = device.type == "cuda"
    orders = on_gpu and moe_utils.HAVE_TE and moe_utils.fused_sort_chunks_by_index_with_probs is not None
    is_swiglu = not shape.megatron.get("glu_linear_offset") and not shape.megatron.get("add_bias_linear")
    return {
        "moe_permute_fusion": orders,
        "bias_activation_fusion": on_gpu and is_swiglu,
    }


def _megatron_config(shape: ModelShape, config: TrainerConfig, device: torch.device) -> TransformerConfig:
    parallel = config.parallel
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    interleaved = parallel.virtual_pipeline > 1
    kind = MLATransformerConfig if shape.megatron.get("multi_latent_attention") else TransformerConfig
    built = kind(
        **{"add_bias_linear": False, **shape.megatron},
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.tensor > 1,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        pipeline_model_parallel_layout=_pipeline_layout(parallel, layers=shape.megatron["num_layers"]),
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,  # see below
        # All groups reduce gradients, without the division by a token count.
        finalize_model_grads_func=lambda model, _tokens=None, **groups: finalize_model_grads(model, None, **groups),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=quick_gelu if shape.megatron.get("glu_linear_offset") else F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.dtype == "bfloat16",
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        # Gradients are summed, not averaged: the loss contains the weight of each token (losses.token_weights).
        calculate_per_token_loss=True,
        variable_seq_lengths=parallel.pipeline > 1,
        # The interleaved schedule gives wrong results with the default order of point-to-point messages.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        **fusions(shape, device),
        **_recompute(config),
    )
    # Megatron refuses a larger one for experts with biases, whose sum over the ranks `GroupedLinear` makes right.
    built.expert_tensor_parallel_size = parallel.expert_tensor_size
    return built


def _pipeline_layout(parallel: ParallelConfig, *, layers: int) -> list[list[str]] | None:
    """Megatron's description of the contents of each stage; None for its default, the same number on all stages.

    3 layers on 2 stages: [["embedding", "decoder", "decoder"], ["decoder", "loss"]].
    """
    if layers % parallel.stages == 0:
        return None
    layout = [["decoder"] * number for number in parallel.layers_per_stage(layers)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def _recompute(config: TrainerConfig) -> dict[str, Any]:
    match config.recompute:
        case "none":
            return {}
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": [*config.recompute_modules]}
        case "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class _NoOutputLayer(torch.nn.Module):
    """In place of the output layer of a model without one."""

    weight = None

    def __init__(self, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def sharded_state_dict(self, prefix: str = "", *_args: Any, **_settings: Any) -> dict[str, Any]:
        """An entry without a tensor, because megatron sets an attribute of the entry."""
        return {f"{prefix}weight": SimpleNamespace()}


def _return_hidden_states(chunk: GPTModel) -> None:
    """Let a chunk with the output layer return the input of this layer, for all rows of the micro-batch.

    The objective then computes the logits of some of the rows at a time; see `loss/logprobs.py`.
    """
    if not chunk.post_process:
        return
    layer: Any = chunk.output_layer

    def unchanged(hidden: Tensor, **_settings: Any) -> tuple[Tensor, None]:
        return gather_from_sequence_parallel_region(hidden) if layer.sequence_parallel else hidden, None

    layer.forward = unchanged
