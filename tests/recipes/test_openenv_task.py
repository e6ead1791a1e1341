"""The recipe over OpenEnv: the client of the package against the echo environment that `openenv init` writes."""

import asyncio
import socket
import subprocess
import sys

import pytest

from agent_loop.loop import TurnLimits
from async_rl.rollout.task import TaskConfig, build_task
from message_queue.errors import RolloutError
from message_queue.tokens import StopReason
from tests.agent_loop.test_loops import TOKENIZER, make_engine, sampled_text, text_of, turn
from tests.helpers.tasks import roll_task

pytest.importorskip("openenv", reason="openenv-core is not installed")
FACTORY = "recipes.openenv.task:openenv_task"
LIMITS = TurnLimits(max_turns=3, max_tokens=2000, tool_timeout_s=60.0)
SESSIONS = 3
INIT = "from openenv.cli.__main__ import main; main()"
SERVE = "import sys, uvicorn; from echo_env.server.app import app; uvicorn.run(app, fd=int(sys.argv[1]))"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-c", INIT, "init", "echo_env"], cwd=folder, check=True, capture_output=True)
    app = folder / "echo_env" / "server" / "app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1", f"max_concurrent_envs={SESSIONS}"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.fileno()
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(number)], cwd=folder, pass_fds=(number,), stderr=subprocess.DEVNULL
        )
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.kill()
        server.wait()


def task(**options):
    return build_task(TaskConfig(factory=FACTORY, options=options), seed=0)


async def roll(own, *turns):
    return await roll_task(own, make_engine(*turns), tokenizer=TOKENIZER, limits=LIMITS)


async def test_each_rollout_has_a_session_and_the_rewards_of_its_steps(url):
    own, turns = task(url=url, observation="echoed_message"), (turn("abc"), turn("defgh"), turn("i"))
    for trajectory in await asyncio.gather(*(roll(own, *turns) for _ in range(SESSIONS))):
        assert sampled_text(trajectory) == "".join(turns)
        assert "environment ready" in text_of(trajectory) and "<|im_start|>user\nabc<|im_end|>" in text_of(trajectory)
        assert (trajectory.stop_reason, trajectory.info["done"]) == (StopReason.LENGTH, 0)
        assert trajectory.reward == pytest.approx(0.9)
    assert (await roll(own, *turns)).reward == pytest.approx(0.9), "the sessions were closed"


async def test_an_observation_is_shown_as_json_by_default(url):
    trajectory = await roll(task(url=url), turn("abc"), turn("d"), turn("e"))
    assert '"echoed_message": "abc"' in text_of(trajectory)


async def test_an_action_that_the_server_refuses_or_no_server_fails_the_rollout(url):
    with pytest.raises(RolloutError, match="step of environment OpenEnvironment"):
        await roll(task(url=url, action="absent"), turn("abc"))
    with pytest.raises(RolloutError, match="reset of environment OpenEnvironment"):
        await roll(task(url="http://127.0.0.1:9"), turn("abc"))


def test_seeds_differ_between_rows_and_from_those_held_out():
    own = task()
    seeds = [own.train_prompt(index).target["seed"] for index in range(50)]
    held_out = [prompt.target["seed"] for prompt in own.validation_prompts(50)]
    assert len({*seeds, *held_out}) == 100
