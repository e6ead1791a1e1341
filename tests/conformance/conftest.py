"""One server of every real engine for the whole package, two sets of weights, and requests to them.

`tested` is what the scenarios (test_scenarios_*.py) run on: the fake, vLLM and SGLang, one after the other. vLLM serves
a model whose first layer is dense; SGLang ignores that in this family, so its replica refuses such a model, and serves
one of experts alone. Latent attention is in tests/e2e/test_vllm_families.py; SGLang has none on a CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import pytest_asyncio

from agent_loop.engine import GenerateRequest
from async_rl.inference.sglang import server as sglang_server_module
from async_rl.inference.sglang.config import server_environment
from async_rl.inference.sglang.engine import SglangReplica, start_sglang
from async_rl.inference.vllm import engine as vllm
from async_rl.inference.vllm.engine import VllmBackend, VllmConfig, VllmReplica, engine_environment
from async_rl.weights.model_info import read_model_info
from async_rl.weights.transport import WeightUpdate, read_update, write_update
from message_queue.tokens import TokenOutput, WeightVersion
from tests.conformance import sglang_support
from tests.conformance.engines import STEP_S, EngineUnderTest, Exchange
from tests.conformance.planted import plugin_folder
from tests.conformance.planted_vllm import EXTENSION
from tests.conformance.probes import (
    CountingScript,
    FakeProbe,
    FakeTruth,
    SglangProbe,
    TransformersTruth,
    VllmProbe,
    slow_down,
)
from tests.helpers import numerics
from tests.helpers.fakes import SPEC, FakeEngine

T = TypeVar("T")
VOCAB = 117
VLLM_KV_TOKENS = 3072
CONFIG = VllmConfig(
    device="cpu",
    threads=numerics.THREADS,
    max_model_len=512,
    max_num_seqs=32,
    max_num_batched_tokens=96,  # prompts longer than this are prefilled in chunks
    kv_cache_bytes=6 << 20,  # VLLM_KV_TOKENS: many long requests do not fit at once
    load_timeout_s=60,
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
    from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint, spread_model

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
    replica = await start_vllm(CONFIG, checkpoint=models.first)
    yield replica
    await replica.close()


@pytest_asyncio.fixture(loop_scope="package")
async def replica(engine: VllmReplica, models: Models) -> VllmReplica:
    """The engine, serving the first weights with an empty prefix cache."""
    await publish(engine, models.update_first)
    return engine


@pytest.fixture(scope="package")
def sglang_models(tmp_path_factory: pytest.TempPathFactory) -> sglang_support.Models:
    """Two checkpoints of an architecture that SGLang serves too: no dense layer."""
    sglang_support.require_sglang()
    return sglang_support.make_models(tmp_path_factory.mktemp("sglang"), sglang_support.qwen3_moe())


@pytest.fixture(scope="package")
def sglang_plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the plugin of `tests.conformance.planted`."""
    return plugin_folder(tmp_path_factory.mktemp("plugins"))


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def sglang_server(sglang_models: sglang_support.Models, sglang_plugins: Path) -> AsyncIterator[SglangReplica]:
    def environment(*args: Any, **options: Any) -> dict[str, str]:
        made = server_environment(*args, **options)
        return made | {"PYTHONPATH": f"{made['PYTHONPATH']}:{sglang_plugins}"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_server_module, "server_environment", environment)
        replica = await start_sglang(sglang_support.config(), name="replica-0", checkpoint=sglang_models.paths[0])
    yield replica
    await replica.close()


@pytest_asyncio.fixture(loop_scope="package")
async def sglang_replica(sglang_server: SglangReplica, sglang_models: sglang_support.Models) -> SglangReplica:
    """The server, serving the first weights with an empty prefix cache."""
    await sglang_support.publish(sglang_server, sglang_models.updates[0])
    return sglang_server


Report = Callable[[str], None]
FIGURE = "figure"


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    """Say a figure in the summary of the run and in its XML."""
    return lambda figure: record_property(FIGURE, figure)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures that the scenarios report."""
    reports = [report for report in terminalreporter.getreports("passed") if report.when == "call"]
    figures = [value for report in reports for name, value in report.user_properties if name == FIGURE]
    if figures:
        terminalreporter.section("figures of the conformance suite")
        for figure in figures:
            terminalreporter.write_line(str(figure))


@pytest.fixture(params=["fake", "vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Any:
    """A replica of each engine, started at most once; None for the fake."""
    fixtures = {"vllm": "engine", "sglang": "sglang_server"}
    return request.getfixturevalue(fixtures[request.param]) if request.param in fixtures else None


@pytest_asyncio.fixture(loop_scope="package")
async def tested(
    server: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EngineUnderTest]:
    """An engine that serves version 0 with an empty prefix cache."""
    if server is None:
        made = fake_under_test()
    elif isinstance(server.backend, VllmBackend):
        made = vllm_under_test(server, request.getfixturevalue("models"), patch=monkeypatch)
    else:
        made = sglang_under_test(server, request.getfixturevalue("sglang_models"), patch=monkeypatch)
    await made.publish(version=0)
    yield made
    await made.end()


def fake_under_test(name: str = "fake-0", *, exchanges: list[Exchange] | None = None) -> EngineUnderTest:
    """A new fake engine."""
    script = CountingScript(vocab_size=VOCAB)
    engine = FakeEngine(script, name=name)
    updates = (
        WeightUpdate(Path("none"), WeightVersion(0, "fake")),
        WeightUpdate(Path("none"), WeightVersion(1, "fake")),
    )
    return EngineUnderTest(
        engine,
        routing=SPEC,
        updates=updates,
        truth=FakeTruth(SPEC, vocab_size=VOCAB),
        probe=FakeProbe(engine, script=script),
        exchanges=exchanges,
    )


def vllm_under_test(
    replica: VllmReplica,
    models: Models | sglang_support.Models,
    *,
    patch: pytest.MonkeyPatch,
    exchanges: list[Exchange] | None = None,
) -> EngineUnderTest:
    """A vLLM replica that serves `models`."""
    if isinstance(models, Models):
        path, updates = models.first, (models.update_first, models.update_second)
        truth = TransformersTruth((models.reference_first, models.reference_second))
    else:
        path, updates, truth = models.paths[0], models.updates, TransformersTruth(models.models)
    return EngineUnderTest(
        replica,
        routing=read_model_info(path).routing,
        updates=updates,
        truth=truth,
        probe=VllmProbe(replica, kv_tokens=VLLM_KV_TOKENS, patch=patch),
        exchanges=exchanges,
    )


def sglang_under_test(
    replica: SglangReplica,
    models: sglang_support.Models,
    *,
    patch: pytest.MonkeyPatch,
    exchanges: list[Exchange] | None = None,
) -> EngineUnderTest:
    """An SGLang replica that serves `models`."""
    return EngineUnderTest(
        replica,
        routing=read_model_info(models.paths[0]).routing,
        updates=models.updates,
        truth=TransformersTruth(models.models),
        probe=SglangProbe(replica, kv_tokens=sglang_support.SMALL_POOL, patch=patch),
        exchanges=exchanges,
    )


async def start_vllm(config: VllmConfig, *, name: str = "replica-0", checkpoint: Path, **options: Any) -> VllmReplica:
    """A replica that `slowly` slows down, until it resumes."""
    with pytest.MonkeyPatch.context() as patch:
        args = vllm.engine_args
        patch.setattr(vllm, "engine_args", lambda *a, **k: args(*a, **k) | {"worker_extension_cls": EXTENSION})
        replica = await vllm.start_vllm(config, name=name, checkpoint=checkpoint, **options)
    resume = replica.resume

    async def resume_at_full_speed() -> None:
        await resume()
        await slow_down(replica, None)

    replica.resume = resume_at_full_speed
    return replica


def slowly(replica: VllmReplica, works: Sequence[Coroutine[Any, Any, T]]) -> list[asyncio.Task[T]]:
    """Run requests beside the test, on an engine that is slow until it resumes.

    The engine may otherwise end all of them before a test on a busy machine looks.
    """
    slow = asyncio.create_task(slow_down(replica, STEP_S))

    async def start(work: Coroutine[Any, Any, T]) -> T:
        await asyncio.shield(slow)
        return await work

    return [asyncio.create_task(start(work)) for work in works]


async def generate(replica: VllmReplica, ask: GenerateRequest) -> TokenOutput:
    """The one segment of a decode that no update reaches in flight."""
    [segment] = await replica.generate(ask)
    return segment


async def publish(replica: VllmReplica, update: WeightUpdate) -> int:
    """Pause, abort, load, resume; returns how many segments were cut."""
    await replica.pause()
    aborted = await replica.abort()
    await replica.load(update)
    await replica.resume()
    return aborted


async def until_sampled(replica: VllmReplica, tokens: int, *, requests: int = 0) -> None:
    """Return when the requests in flight have sampled `tokens` together, and `requests` of them at least one each.

    vLLM has no event for it.

    Raises:
        AssertionError: all of them ended before.
    """
    seen = await samples(replica, tokens, requests=requests)
    assert seen, f"all requests ended before {tokens} tokens were seen in flight"


async def samples(replica: VllmReplica, tokens: int, *, requests: int = 0) -> bool:
    """As `until_sampled`, but false if all requests ended before."""
    states: Any = replica.backend.engine.output_processor.request_states
    started = False
    while True:
        counts = [state.detokenizer.num_output_tokens() for state in states.values()]
        if sum(counts) >= tokens and sum(count > 0 for count in counts) >= requests:
            return True
        if started and not counts:
            return False
        started = bool(counts)
        await asyncio.sleep(0.005)


def prompt(length: int, *, seed: int = 0) -> np.ndarray[Any, Any]:
    """int32 [length]."""
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


def request(request_id: str, token_ids: Any, *, max_new_tokens: int = 24, **fields: Any) -> GenerateRequest:
    """A request that nothing but its budget stops."""
    return GenerateRequest(request_id=request_id, token_ids=token_ids, max_new_tokens=max_new_tokens, **fields)
