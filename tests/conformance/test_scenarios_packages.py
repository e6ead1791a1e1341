"""Agent programs of well-known packages, unchanged, on real engines: what is trained is what a tap at the engine saw.

The models are untrained, so a program gets random text for an answer. It has to make a call and to end by itself. What
the programs make of good answers is in tests/agents.
"""

from dataclasses import replace

import pytest
import pytest_asyncio

from agent_loop.engine import SamplingConfig
from agent_loop.loop import TurnLimits
from agent_loop.programs.endpoint.host import EndpointConfig, Sessions
from agent_loop.programs.program import ProgramLoop, command
from async_rl.inference.sglang.engine import start_sglang
from async_rl.weights.model_info import read_model_info
from message_queue.trajectory import Trajectory
from tests.agent_loop.endpoint.test_programs import PROMPT
from tests.agents.test_agents import HERE, INSTALLED, PROGRAMS, PYTHON, program_id
from tests.conformance import sglang_support
from tests.conformance.engines import MARKS
from tests.conformance.served import VLLM, start_vllm
from tests.conformance.tapped import Tap, taken_of
from tests.conformance.test_scenarios_sessions import CHAT, READ
from tests.helpers.tiny_models import save_checkpoint

pytestmark = [*MARKS, INSTALLED]
MAX_TOKENS = 8192  # smolagents describes its tools at length
LIMITS = TurnLimits(max_turns=12, max_tokens=MAX_TOKENS, max_new_tokens_per_turn=64, max_refused_answers=0)


@pytest_asyncio.fixture(scope="module", loop_scope="package", params=["vllm", "sglang"])
async def tap(request, environment, tmp_path_factory):
    """A replica with room for long prompts, and its answers."""
    if request.param == "sglang":
        sglang_support.require_sglang()
    model = sglang_support.qwen3_moe(max_position_embeddings=MAX_TOKENS)
    checkpoint = save_checkpoint(model, tmp_path_factory.mktemp("packages"), seed=0)
    options = {"name": "replica-0", "checkpoint": checkpoint}
    room = {"max_model_len": MAX_TOKENS, "max_num_batched_tokens": 1024}
    if request.param == "vllm":
        replica = await start_vllm(replace(VLLM, kv_cache_bytes=32 << 20, **room), **options)
    else:
        replica = await start_sglang(sglang_support.config(kv_cache_tokens=2 * MAX_TOKENS, **room), **options)
    yield Tap(replica), read_model_info(checkpoint).routing
    await replica.close()


@pytest.mark.parametrize("program", [program for program, *_ in PROGRAMS], ids=program_id)
async def test_agent_of_a_package_trains_what_the_engine_saw(tap, program, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    replica, routing = tap
    script, *arguments = program
    sessions, trajectory = Sessions(EndpointConfig()), Trajectory(routing=routing)
    loop = ProgramLoop(
        program=command(str(PYTHON), str(HERE / script), *arguments),
        gateway=sessions,
        engine=replica,
        chat=CHAT,
        read=READ,
        reward=None,
        limits=LIMITS,
        sampling=SamplingConfig(),
    )
    try:
        await loop.run(PROMPT, trajectory=trajectory, session=tmp_path.name, cache_salt="v0")
    finally:
        await sessions.close()
    assert taken_of(trajectory, name=tmp_path.name, answered=replica.answered)
    assert trajectory.info["turns"] >= 1
