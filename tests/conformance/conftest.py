"""One real engine for the whole package, two sets of weights, and requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from agent_loop.engine import GenerateRequest
from async_rl.engines.vllm import VllmConfig, VllmReplica, engine_environment
from async_rl.weights.transport import WeightUpdate, read_update, write_update

VOCAB = 117
CONFIG = VllmConfig(
    device="cpu",
    max_model_len=512,
    max_num_seqs=32,
    max_num_batched_tokens=96,  # prompts longer than this are prefilled in chunks
    kv_cache_bytes=6 << 20,  # 3072 tokens: many long requests do not fit at once
    load_timeout_s=60,
    generate_timeout_s=100,
    start_timeout_s=110,
)


@dataclass(frozen=True, slots=True)
class Models:
    """Two checkpoints of one architecture, as folders, as transformers models, and as updates."""

    first: Path
    reference_first: Any
    reference_second: Any
    update_first: WeightUpdate
    update_second: WeightUpdate


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    from tests.tiny_models import qwen3_moe_config, save_checkpoint, spread_model

    folder = tmp_path_factory.mktemp("models")
    config = qwen3_moe_config(vocab_size=VOCAB)
    paths = [save_checkpoint(config, folder / str(seed), seed=seed) / "model.safetensors" for seed in (0, 1)]
    updates = [write_update(folder / "updates", version=i, tensors=read_update(path)) for i, path in enumerate(paths)]
    return Models(folder / "0", spread_model(config, seed=0), spread_model(config, seed=1), updates[0], updates[1])


@pytest.fixture(scope="package")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment(CONFIG).items():
            patch.setenv(name, value)
        yield


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def engine(models: Models, environment: None) -> AsyncIterator[VllmReplica]:
    replica = await VllmReplica.start(CONFIG, name="replica-0", checkpoint=models.first)
    yield replica
    await replica.close()


@pytest_asyncio.fixture(loop_scope="package")
async def replica(engine: VllmReplica, models: Models) -> VllmReplica:
    """The engine, serving the first weights with an empty prefix cache."""
    await publish(engine, models.update_first)
    return engine


async def publish(replica: VllmReplica, update: WeightUpdate) -> int:
    """Pause, abort, load, resume; returns how many segments were cut."""
    await replica.pause()
    aborted = await replica.abort()
    await replica.load(update)
    await replica.resume()
    return aborted


async def until_sampled(replica: VllmReplica, tokens: int) -> None:
    """Return when the requests in flight have sampled `tokens` together; vLLM has no event for it."""
    states: Any = replica._engine.output_processor.request_states
    while sum(state.detokenizer.num_output_tokens() for state in states.values()) < tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def prompt(length: int, *, seed: int = 0) -> np.ndarray[Any, Any]:
    """int32 [length]."""
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


def request(request_id: str, token_ids: Any, *, max_new_tokens: int = 24, **fields: Any) -> GenerateRequest:
    """A request that nothing but its budget stops."""
    return GenerateRequest(request_id=request_id, token_ids=token_ids, max_new_tokens=max_new_tokens, **fields)
