"""One server of every real engine for the whole package, and three sets of weights.

The scenarios (test_scenarios_*.py) run on `tested`: the fake, vLLM and SGLang, one after the other. vLLM serves a model
whose first layer is dense. SGLang ignores dense layers in this family, so its replica refuses such a model, and serves
one of experts alone. Latent attention is in tests/e2e/test_engine_families.py; SGLang has none on a CPU.
"""

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from async_rl.inference.sglang import server as sglang_server_module
from async_rl.inference.sglang.config import server_environment
from async_rl.inference.sglang.engine import SglangReplica, start_sglang
from async_rl.inference.vllm import config as vllm_config
from async_rl.inference.vllm.engine import VllmBackend, VllmReplica, engine_environment
from tests.conformance import sglang_support
from tests.conformance.engines import DRAFTS, VOCAB, EngineUnderTest
from tests.conformance.planted import plugin_folder
from tests.conformance.served import SPECULATION, VLLM, Models, fake_under_test, make_models, start_vllm, under_test
from tests.helpers.tiny_models import qwen3_moe_config


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"), qwen3_moe_config(vocab_size=VOCAB))


@pytest.fixture(scope="package")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment(VLLM).items():
            patch.setenv(name, value)
        yield


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def engine(models: Models, environment: None) -> AsyncIterator[VllmReplica]:
    replica = await start_vllm(VLLM, checkpoint=models.paths[0])
    yield replica
    await replica.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def vllm_with_drafts(models: Models, environment: None) -> AsyncIterator[VllmReplica]:
    """Each token that occurred before is followed by drafts, so most steps accept some and reject others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_config, "NGRAMS", {"prompt_lookup_min": 1, "prompt_lookup_max": 3})
        replica = await start_vllm(replace(VLLM, speculation=SPECULATION), checkpoint=models.paths[0])
    yield replica
    await replica.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def second_vllm(models: Models, environment: None) -> AsyncIterator[VllmReplica]:
    replica = await start_vllm(VLLM, name="replica-1", checkpoint=models.paths[0])
    yield replica
    await replica.close()


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def vllm_of_two_ranks(models: Models, environment: None) -> AsyncIterator[VllmReplica]:
    """Each rank has half of the heads, so half of the bytes have the same number of tokens."""
    config = replace(VLLM, tensor_parallel=2, kv_cache_bytes=VLLM.kv_cache_bytes // 2)
    replica = await start_vllm(config, checkpoint=models.paths[0])
    yield replica
    await replica.close()


@pytest.fixture(scope="package")
def sglang_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Checkpoints of an architecture that SGLang serves too: no dense layer."""
    sglang_support.require_sglang()
    return make_models(tmp_path_factory.mktemp("sglang"), sglang_support.qwen3_moe())


@pytest.fixture(scope="package")
def sglang_plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the plugin of `tests.conformance.planted`."""
    return plugin_folder(tmp_path_factory.mktemp("plugins"))


@contextmanager
def sglang_environment(plugins: Path) -> Generator[None]:
    """Servers that are started in this block have the plugin of `plugin_folder`."""

    def environment(*args: Any, **options: Any) -> dict[str, str]:
        made = server_environment(*args, **options)
        return made | {"PYTHONPATH": f"{made['PYTHONPATH']}:{plugins}"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_server_module, "server_environment", environment)
        yield


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def sglang_server(sglang_models: Models, sglang_plugins: Path) -> AsyncIterator[SglangReplica]:
    with sglang_environment(sglang_plugins):
        replica = await start_sglang(sglang_support.config(), name="replica-0", checkpoint=sglang_models.paths[0])
    yield replica
    await replica.close()


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def sglang_of_two_ranks(sglang_models: Models) -> AsyncIterator[SglangReplica]:
    config = sglang_support.config(tensor_parallel=2)
    replica = await start_sglang(config, name="replica-0", checkpoint=sglang_models.paths[0])
    yield replica
    await replica.close()


FIGURE = "figure"


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Report a figure in the summary of the run and in its XML."""
    return lambda figure: record_property(FIGURE, figure)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures that the scenarios report."""
    reports = [report for report in terminalreporter.getreports("passed") if report.when == "call"]
    figures = [value for report in reports for name, value in report.user_properties if name == FIGURE]
    if figures:
        terminalreporter.section("figures of the conformance suite")
        for figure in figures:
            terminalreporter.write_line(str(figure))


@pytest.fixture(params=["fake", "vllm", DRAFTS, "sglang"])
def server(request: pytest.FixtureRequest) -> Any:
    """A replica of each engine, started at most once; None for the fake."""
    fixtures = {
        "vllm": "engine",
        "vllm-drafts": "vllm_with_drafts",
        "vllm-tp2": "vllm_of_two_ranks",
        "sglang": "sglang_server",
        "sglang-tp2": "sglang_of_two_ranks",
    }
    return request.getfixturevalue(fixtures[request.param]) if request.param in fixtures else None


@pytest.fixture
def served_models(server: Any, request: pytest.FixtureRequest) -> Models:
    """The models that a real engine serves."""
    return request.getfixturevalue("models" if isinstance(server.backend, VllmBackend) else "sglang_models")


@pytest_asyncio.fixture(loop_scope="package")
async def tested(
    server: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EngineUnderTest]:
    """An engine that serves version 0 with an empty prefix cache."""
    if server is None:
        made = fake_under_test()
    else:
        made = under_test(server, request.getfixturevalue("served_models"), patch=monkeypatch)
    await made.publish(version=0)
    yield made
    await made.end()
