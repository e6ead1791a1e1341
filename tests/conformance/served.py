"""Replicas for tests: the models that they serve, and each as an `EngineUnderTest`."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from async_rl.inference.sglang.engine import SglangReplica
from async_rl.inference.vllm import engine as vllm
from async_rl.inference.vllm.config import Speculation
from async_rl.inference.vllm.engine import VllmBackend, VllmConfig, VllmReplica
from async_rl.weights.model_info import read_model_info
from async_rl.weights.transport import WeightUpdate, read_tensors
from message_queue.tokens import WeightVersion
from tests.conformance.engines import VOCAB, EngineUnderTest, Exchange
from tests.conformance.planted import FAULT
from tests.conformance.planted_vllm import EXTENSION
from tests.conformance.probes import CountingScript, FakeProbe, FakeTruth, SglangProbe, TransformersTruth, VllmProbe
from tests.conformance.sglang_support import SMALL_POOL
from tests.helpers import numerics
from tests.helpers.fakes import SPEC, FakeEngine
from tests.helpers.tiny_models import has_vision, save_checkpoint, spread_model
from tests.helpers.updates import write_update

VLLM_KV_TOKENS = 3072
VLLM = VllmConfig(
    device=numerics.DEVICE,
    threads=numerics.THREADS,
    max_model_len=512,
    max_num_seqs=32,
    max_num_batched_tokens=96,  # prompts longer than this are prefilled in chunks
    kv_cache_bytes=6 << 20,  # VLLM_KV_TOKENS: many long requests do not fit at once
    load_timeout_s=60,
    start_timeout_s=110,
)


SPECULATION = Speculation(method="ngram", tokens=3)
BUCKET_BYTES = 64 << 10  # so that an update has several buckets


@dataclass(frozen=True, slots=True)
class Models:
    """Checkpoints of one architecture with seeds 0, 1, 2: folders, transformers models, updates of versions 0 to 2."""

    paths: tuple[Path, ...]
    models: tuple[Any, ...]
    updates: tuple[WeightUpdate, ...]


def make_models(folder: Path, architecture: Any) -> Models:
    """Save them, and write them as updates."""
    seeds = range(3)
    paths = tuple(save_checkpoint(architecture, folder / str(seed), seed=seed) for seed in seeds)
    updates = tuple(
        write_update(folder / "updates", version=i, tensors=_trained_tensors(path), bucket_bytes=BUCKET_BYTES)
        for i, path in enumerate(paths)
    )
    if has_vision(architecture):
        models = tuple(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths)
    else:
        models = tuple(spread_model(architecture, seed=seed) for seed in seeds)
    return Models(paths, models, updates)


def _trained_tensors(path: Path) -> list[tuple[str, torch.Tensor]]:
    return [(n, tensor) for n, tensor in read_tensors(path / "model.safetensors") if not n.startswith("model.visual.")]


def small_steps(models: Models, folder: Path) -> Models:
    """Models that differ from the first in a tenth of its values, so that `sync.delta` writes changes."""
    first, made, updates = models.models[0], [], []
    chance = torch.Generator().manual_seed(0)
    for version, model in enumerate(models.models):
        step = copy.deepcopy(first)
        with torch.no_grad():
            for value, other in zip(step.parameters(), model.parameters(), strict=True):
                value.copy_(torch.where(torch.rand(value.shape, generator=chance) < 0.1, other, value))
        step.save_pretrained(folder / str(version))
        tensors = read_tensors(folder / str(version) / "model.safetensors")
        updates.append(write_update(folder / "updates", version=version, tensors=tensors, bucket_bytes=BUCKET_BYTES))
        made.append(step)
    return Models(models.paths, tuple(made), tuple(updates))


def under_test(
    replica: VllmReplica | SglangReplica,
    models: Models,
    *,
    patch: pytest.MonkeyPatch,
    exchanges: list[Exchange] | None = None,
) -> EngineUnderTest:
    """A replica that serves `models`."""
    if isinstance(replica.backend, VllmBackend):
        probe: Any = VllmProbe(replica, kv_tokens=VLLM_KV_TOKENS, patch=patch)
    else:
        probe = SglangProbe(replica, kv_tokens=SMALL_POOL, patch=patch)
    return EngineUnderTest(
        replica,
        routing=read_model_info(models.paths[0]).routing,
        updates=models.updates,
        truth=TransformersTruth(models.models),
        probe=probe,
        exchanges=exchanges,
    )


def fake_under_test(name: str = "fake-0", *, exchanges: list[Exchange] | None = None) -> EngineUnderTest:
    """A new fake engine."""
    script = CountingScript(vocab_size=VOCAB)
    engine = FakeEngine(script, name=name)
    first, second = (WeightUpdate(Path("none"), WeightVersion(version, "fake")) for version in (0, 1))
    return EngineUnderTest(
        engine,
        routing=SPEC,
        updates=(first, second),
        truth=FakeTruth(SPEC, vocab_size=VOCAB),
        probe=FakeProbe(engine, script=script),
        exchanges=exchanges,
    )


async def plant(tested: EngineUnderTest, plugins: Path, fault: str) -> None:
    """Put a fault of `tests.conformance.planted` into later loads of an engine; "" takes it away.

    plugins: from `plugin_folder`.
    """
    replica: Any = tested.replica
    if isinstance(tested.probe, VllmProbe):
        await replica.backend.engine.collective_rpc("plant", args=(fault,))
    else:
        (plugins / FAULT).write_text(fault)


async def start_vllm(config: VllmConfig, *, name: str = "replica-0", checkpoint: Path, **options: Any) -> VllmReplica:
    """A replica whose steps can be slowed down, and whose loads can go wrong."""
    with pytest.MonkeyPatch.context() as patch:
        args = vllm.engine_args
        patch.setattr(vllm, "engine_args", lambda *a, **k: args(*a, **k) | {"worker_extension_cls": EXTENSION})
        return await vllm.start_vllm(config, name=name, checkpoint=checkpoint, **options)
