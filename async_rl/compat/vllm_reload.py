"""Loads weights into vLLM's model or its twin, by vLLM's own reload, and packs a tied lm_head after every reload."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _get_original_loader,  # pyright: ignore[reportPrivateUsage]
    _place_kernel_tensors,  # pyright: ignore[reportPrivateUsage]
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import sanitize_layer_refs
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

from async_rl.weights.twin import Twin


@contextlib.contextmanager
def placed_again(model: torch.nn.Module) -> Generator[None]:
    """Context of a reload. After an error inside, every module has its own tensors, and a reload can start.

    vLLM's reload puts a module on the meta device until its last tensor has come. The tensors that came before the
    error must not count for the next version. The values may be of two versions.
    """
    try:
        yield
    except BaseException:
        for module in model.modules():
            info = get_layerwise_info(module)
            if info.kernel_tensors is not None:
                _place_kernel_tensors(module, info)
            info.reset()
        LOADING_LAYERS.clear()
        raise


def reloadable(
    model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an update as vLLM's reload keeps them.

    The reload keeps a tensor that goes through the `weight_loader` of a parameter. vLLM copies the experts of gpt-oss
    and its sinks without it, into parameters on the meta device, so that the values would be lost. vLLM uses the
    loader for experts that come one by one:

        model.layers.0.mlp.experts.down_proj [8, 64, 32]    model.layers.0.mlp.experts.0.down_proj [64, 32], 1, ... 7
        model.layers.0.self_attn.sinks [4]                  loaded here: the heads of this rank

    Args:
        model: model that is loaded, inside its reload.
        tensors: name in the checkpoint -> tensor.
    """
    if not isinstance(model, GptOssForCausalLM):
        yield from tensors
        return
    for name, tensor in tensors:
        layer, of_experts, weight = name.partition(".experts.")
        if of_experts:
            yield from ((f"{layer}.experts.{number}.{weight}", expert) for number, expert in enumerate(tensor))
        elif name.endswith(".sinks"):
            sinks: Any = model.get_parameter(name.replace(".self_attn.", ".attn."))
            sinks.weight_loader(sinks, tensor[len(sinks) * get_tensor_model_parallel_rank() :][: len(sinks)])
        else:
            yield name, tensor


def reload_twin(twin: Twin, tensors: Iterable[tuple[str, torch.Tensor]], *, config: VllmConfig) -> None:
    """Load tensors with Hugging Face names into a twin, while the model decodes."""
    for module, copy in twin.modules:
        _share_reload_metadata(module, copy)
    with set_current_vllm_config(config):
        reload_weights(
            config,
            twin.model,
            weights_iterator=reloadable(twin.model, tensors),
            weights_path=None,
            is_checkpoint_format=True,
        )
    pack_tied_head(twin.model, config)


def _share_reload_metadata(module: torch.nn.Module, copy: torch.nn.Module) -> None:
    """Give a copy the metadata that vLLM reloads a module with; its weight loaders are methods of the copy."""
    known, ours = get_layerwise_info(module), get_layerwise_info(copy)
    ours.restore_device = known.restore_device
    parameters, buffers = known.restore_metadata

    def described(tensor: torch.Tensor) -> torch.Tensor:
        meta: Any = to_meta_tensor(tensor)
        meta.weight_loader = _get_original_loader(meta)  # a load of the module leaves its own wrapper
        return sanitize_layer_refs(meta, module)

    ours.restore_metadata = (
        {name: described(tensor) for name, tensor in parameters.items()},
        {name: described(tensor) for name, tensor in buffers.items()},
    )


def pack_tied_head(model: torch.nn.Module, config: VllmConfig) -> None:
    """Repack a tied lm_head for its CPU kernel, because vLLM packs only modules with tensors in the update."""
    if getattr(config.model_config.hf_text_config, "tie_word_embeddings", False):
        for head in model.modules():
            if isinstance(head, ParallelLMHead):
                head.quant_method.process_weights_after_loading(head)
