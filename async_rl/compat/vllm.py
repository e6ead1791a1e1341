"""Fixes for vLLM 0.32's CPU backend: routed-experts capture, expert weight updates, seeded sampling, forced routing,
draft tokens, expert and data parallelism.

In vLLM, only the GPU model runner V2 uses the routed-experts data plane (`vllm/distributed/aux_output_connector`), and
only that runner returns the tokens that the sampler kept. Here the CPU runner makes the same calls to the data plane
and returns kept tokens in the same form.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import (
    AuxOutputWorkerConnector,
    PendingAuxOutput,
    get_aux_output_connector,
)
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.v1.outputs import SamplerOutput, SamplingMaskLists
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from async_rl.compat.vllm_delta_net import compute_delta_nets_in_float32
from async_rl.compat.vllm_drafts import Verified, at_each_sample
from async_rl.compat.vllm_forced import ForcedRouting
from async_rl.weights.checksum import PACKED, content


class RoutingCPUModelRunner(CPUModelRunner):
    """vLLM's CPU runner with capture and forcing of routed experts, and with kept tokens of cut distributions.

    A sample that vLLM discards (of a partial prefill) does not advance the random state of a seeded request.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._capture: AuxOutputWorkerConnector | None = None
        self._layout: Any = None
        self._pending: PendingAuxOutput | None = None
        self._verified: Verified | None = None
        self._forced: ForcedRouting | None = None
        self._counts: dict[str, int] = {}
        self._logprobs: torch.Tensor | None = None
        sampler: Any = self.sampler.topk_topp_sampler
        sampler.forward = self._noting_logprobs(sampler.forward)

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Initialize the K/V cache and attach the capture to the model's routers."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if not self.vllm_config.aux_output_config.enabled:
            return
        self._capture = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)
        self._forced = ForcedRouting(self.model)
        if not self.cache_config.enable_prefix_caching:
            _keep_no_blocks(self._capture)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """Run the forward pass, then collect its routing before the next step overwrites it."""
        if self._capture is None:
            return super().execute_model(scheduler_output, intermediate_tensors)
        self._capture.begin_step(scheduler_output.aux_output_connector_metadata)
        self._counts = scheduler_output.num_scheduled_tokens
        if self._forced is not None:
            self._forced.update(scheduler_output)
        output = super().execute_model(scheduler_output, intermediate_tensors)
        if scheduler_output.total_num_scheduled_tokens:
            self._layout = self._step_layout()
            self._pending = self._capture.prepare_output(self._layout)
        self._counts = {}
        return output

    def pin_routing(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """See `ForcedRouting.pin`; of the requests of this group of data parallelism."""
        if self._forced is not None:
            self._forced.pin({request_id: fields for request_id, fields in rows.items() if request_id in self.requests})

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass with the forced experts of this step; a warm-up run has no requests."""
        if self._forced is None or not self._counts:
            return super()._model_forward(*args, **kwargs)
        batch = self.input_batch
        starts = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        with self._forced.step(batch.req_ids, starts, [self._counts[request_id] for request_id in batch.req_ids]):
            return super()._model_forward(*args, **kwargs)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Sample, and add the routing rows and kept tokens of the step to the output."""
        self._logprobs = self._verified = None
        untouched = [(g, g.get_state()) for g in self._generators_of_partial_prefills().values()]
        output: Any = super().sample_tokens(grammar_output)
        for generator, state in untouched:
            generator.set_state(state)
        pending, self._pending = self._pending, None
        layout, self._layout = self._layout, None
        if layout is not None:
            if list(output.req_ids) != layout.req_ids:
                raise RuntimeError(f"routing rows belong to {layout.req_ids}, tokens to {output.req_ids}")
            rejected = np.zeros(len(layout.req_ids), np.int64)
            if self._verified is not None:
                rejected = self._verified.rejected.numpy()
                self._forget_rejected(layout, rejected)
            if pending is not None:
                sampled = np.array([len(tokens) for tokens in output.sampled_token_ids], dtype=np.int32)
                pending.enqueue_cpu_copy(sampled, rejected.astype(np.int32))
                output.aux_output_connector_output = pending.process_output()
        if self._logprobs is not None:
            output.sampling_masks = self._kept_tokens(self._logprobs)
        return output

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> SamplerOutput:
        """Sample at every draft position from the target, and keep what `Verified` keeps."""
        if spec_decode_metadata is None:
            return super()._sample(logits, spec_decode_metadata)
        num_drafts: list[int] = spec_decode_metadata.num_draft_tokens
        requests = torch.arange(len(num_drafts)).repeat_interleave(torch.tensor(num_drafts) + 1)
        min_p = [0.0 if params is None else params.min_p for params in self._sampling_params()]
        metadata = at_each_sample(self.input_batch.sampling_metadata, requests, min_p)
        output = self.sampler(logits=logits, sampling_metadata=metadata)
        drafts = spec_decode_metadata.draft_token_ids
        self._verified = verified = Verified.of(output.sampled_token_ids.flatten(), drafts, num_drafts)
        scored = output.logprobs_tensors
        return SamplerOutput(verified.tokens, None if scored is None else verified.logprobs(scored))

    def _forget_rejected(self, layout: Any, rejected: NDArray[np.int64]) -> None:
        """Drop what `ForcedRouting` recorded of rejected drafts; layout: of the step."""
        if self._forced is not None:
            ends = layout.num_computed_tokens_np + np.diff(layout.query_start_loc_np) - rejected
            self._forced.end_at({layout.req_ids[i]: int(ends[i]) for i in rejected.nonzero()[0]})

    def _copy_draft_token_ids_to_cpu(self, scheduler_output: Any, zeros_only: bool = False) -> None:
        """Keep the drafts as lists; vLLM copies them over a CUDA stream. zeros_only: there is no room for drafts."""
        drafts: Any = self._draft_token_ids
        if zeros_only:
            drafts = [[] for _ in self.input_batch.req_ids]
        self._draft_token_ids = drafts.tolist() if torch.is_tensor(drafts) else drafts
        self._draft_token_req_ids = self.input_batch.req_ids.copy()

    def _sampling_params(self) -> list[Any]:
        """Of the requests in the batch, in order."""
        return [self.requests[request_id].sampling_params for request_id in self.input_batch.req_ids]

    def _noting_logprobs(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the sampler's last step to keep the logprobs [samples, vocab], -inf for cut tokens."""

        def noting(*args: Any, **kwargs: Any) -> Any:
            sampled, self._logprobs = forward(*args, **kwargs)
            return sampled, self._logprobs

        return noting

    def _kept_tokens(self, logprobs: torch.Tensor) -> SamplingMaskLists | None:
        """Kept tokens of the requests with a top_k (every cut request has one), from logprobs [samples, vocab]."""
        cut = torch.tensor([params is not None and params.top_k > 0 for params in self._sampling_params()])
        if not cut.any():
            return None
        firsts = None
        if self._verified is not None:
            counts = self._verified.counts
            logprobs, cut = logprobs[self._verified.kept_rows], cut.repeat_interleave(counts)
            firsts = [0, *counts.cumsum(0).tolist()]
        kept = (logprobs > -torch.inf) & cut.unsqueeze(1)
        offsets = np.concatenate(([0], kept.sum(1).cumsum(0).numpy()))
        return SamplingMaskLists(kept.nonzero()[:, 1].to(torch.int32).numpy(), offsets, firsts)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Hide the generators of partial prefills from vLLM, because it truncates them by an offset.

        CPU generators have no offset; `sample_tokens` restores their state instead.
        """
        hidden = self._generators_of_partial_prefills()
        for index in hidden:
            del self.input_batch.generators[index]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(hidden)

    def _generators_of_partial_prefills(self) -> dict[int, torch.Generator]:
        """Batch index -> seeded generator, of requests whose sample in this step is discarded."""
        generators = self.input_batch.generators
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        return {int(i): generators[int(i)] for i in discarded if int(i) in generators}

    def _step_layout(self) -> Any:
        """The position ranges of the requests in this step, in the fields of runner V2's input batch."""
        batch = self.input_batch
        counts = [self._counts[request_id] for request_id in batch.req_ids]
        return SimpleNamespace(
            req_ids=list(batch.req_ids),
            query_start_loc_np=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[: batch.num_reqs].copy(),
        )


class RoutingCPUWorker(CPUWorker):
    """vLLM's CPU worker with `RoutingCPUModelRunner`."""

    def init_device(self) -> None:
        """Replace the runner class in vLLM's module during the call, because vLLM uses it by name."""
        upstream: Any = importlib.import_module(CPUWorker.__module__)
        original = upstream.CPUModelRunner
        upstream.CPUModelRunner = RoutingCPUModelRunner
        try:
            super().init_device()
        finally:
            upstream.CPUModelRunner = original


@cache  # vLLM may load a plugin more than once
def repair_cpu_backend() -> None:
    """Apply the patches below."""
    _allow_routing_capture()
    _prepack_experts_on_reload()
    _compute_local_experts_only()
    _exchange_tokens_of_groups()
    _note_packed_weights()
    _import_without_torchvision()
    compute_delta_nets_in_float32()


def _allow_routing_capture() -> None:
    """Patch vLLM's checks so that they accept routing capture and kept tokens on the CPU.

    The skipped requirements are model runner V2, and prefix caching, absent from the CPU kernels of latent attention.
    """
    upstream: Any = VllmConfig
    check, check_masks = upstream._verify_aux_output_compatibility, upstream._verify_sampling_replay_config

    def check_all_else(self: VllmConfig) -> None:
        cache = _Seen(self.cache_config, enable_prefix_caching=True)
        check(_Seen(self, use_v2_model_runner=True, cache_config=cache))

    upstream._verify_aux_output_compatibility = check_all_else
    upstream._verify_sampling_replay_config = lambda self: check_masks(_Seen(self, use_v2_model_runner=True))


def _prepack_experts_on_reload() -> None:
    """Patch vLLM to pack expert weights for the CPU kernel at every load.

    Without the patch it packs them only at the first load, and every later load leaves wrong weights.
    """
    upstream: Any = UnquantizedFusedMoEMethod
    process = upstream.process_weights_after_loading

    def process_and_pack(self: Any, layer: torch.nn.Module) -> None:
        is_update = self.moe_kernel is not None
        process(self, layer)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    upstream.process_weights_after_loading = process_and_pack


def _compute_local_experts_only() -> None:
    """Patch vLLM's CPU kernel for expert parallelism: a rank computes its own experts and gives the others weight 0.

    Without the patch the kernel uses ids of the whole layer as indices of the rank's experts and reads beyond them.
    """
    upstream: Any = CPUUnquantizedExperts
    parameters = inspect.signature(upstream.apply)
    apply = upstream.apply

    def apply_local(self: Any, *args: Any, **kwargs: Any) -> None:
        given = parameters.bind(self, *args, **kwargs)
        local_of = given.arguments["expert_map"]  # [experts] -> index on this rank, -1 elsewhere; None without
        if local_of is not None:
            local = local_of[given.arguments["topk_ids"].long()]
            given.arguments["topk_weights"] = given.arguments["topk_weights"].masked_fill(local < 0, 0.0)
            given.arguments["topk_ids"] = local.clamp(min=0)
        apply(*given.args, **given.kwargs)

    upstream.apply = apply_local


def _exchange_tokens_of_groups() -> None:
    """Patch vLLM's communicator on the CPU with the two collectives that data parallelism needs around the experts.

    Groups with 3 and 1 tokens: each gathers all 4, computes its part of the experts, and gets its own sums back.
    """
    upstream: Any = CpuCommunicator

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list):
            return [all_gatherv(self, part, dim, sizes) for part in input_]
        counts = sizes or [len(input_)] * self.world_size
        padded = input_.new_zeros(max(counts), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in counts]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> Any:
        counts = sizes or [len(input_) // self.world_size] * self.world_size
        total = input_.clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        return total.split(counts)[self.rank_in_group]

    upstream.all_gatherv = all_gatherv
    upstream.reduce_scatterv = reduce_scatterv


def _note_packed_weights() -> None:
    """Patch vLLM to store checksum and sums of a linear weight on its layer when the weight is packed.

    vLLM packs linear weights into an opaque object of its kernel library and drops the tensor, so the weight cannot be
    read back later. Each load repacks the weight and replaces them.
    """
    upstream: Any = importlib.import_module("vllm.model_executor.layers.utils")
    pack = upstream.dispatch_cpu_unquantized_gemm

    def note_and_pack(layer: Any, remove_weight: bool) -> None:
        if not layer.weight.is_meta:
            setattr(layer, PACKED, content(layer.weight))
        pack(layer, remove_weight)

    upstream.dispatch_cpu_unquantized_gemm = note_and_pack


def _import_without_torchvision() -> None:
    """Let vLLM import its models with vision towers, whose text part is served, if torchvision is not installed.

    vLLM takes one function of transformers from a module that imports torchvision. The module for PIL has it, too.
    """
    if importlib.util.find_spec("torchvision") is None:
        module = "transformers.models.qwen2_vl.image_processing_{}qwen2_vl"
        sys.modules.setdefault(module.format(""), importlib.import_module(module.format("pil_")))


class _Seen:
    """A view of an object with some attributes replaced."""

    def __init__(self, target: object, **attributes: object) -> None:
        self.__dict__.update(attributes, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


def _keep_no_blocks(capture: AuxOutputWorkerConnector) -> None:
    """Release completed blocks at once; without a prefix cache they have no hash to be stored under."""
    connector: Any = capture

    def release(batches: Any, retain_keys: Any = (), release_keys: Any = ()) -> None:
        del retain_keys, release_keys
        for _, completed in batches:
            for _, rows in completed:
                connector._buffer.release_block(rows)

    connector._publish_blocks = release
