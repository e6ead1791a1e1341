"""Agent programs of well-known packages, unchanged: base URL and key, nothing else; on a fake engine.

`make setup-agents` installs the packages into a separate virtualenv; without it these tests are skipped.
"""

import os
from pathlib import Path

import pytest

from agent_loop.loop import TurnLimits
from agent_loop.programs.endpoint.host import EndpointConfig, Sessions
from agent_loop.programs.program import command
from tests.agent_loop.endpoint.test_programs import ASK, roll
from tests.agent_loop.test_session import Answers
from tests.helpers.fakes import FakeEngine

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("AGENTS_PYTHON", HERE.parent.parent / ".venv-agents/bin/python")).absolute()
LIMITS = TurnLimits(max_turns=8, max_tokens=40_000, generate_timeout_s=100.0, agent_timeout_s=300.0)
SUBMIT = (
    '<tool_call>{"name": "bash", "arguments": '
    '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 3"}}</tool_call>'
)
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "3"}}</tool_call>'
ADDS = {"tool_response": "3", "1+2": ASK}

INSTALLED = pytest.mark.skipif(not PYTHON.exists(), reason="the agents are not installed (make setup-agents)")
PROGRAMS = [  # arguments, answers of the model, turns of the paths
    (("with_openai_agents.py", "responses"), ADDS, [2]),
    (("with_openai_agents.py", "chat_completions"), ADDS, [2]),
    (("with_langgraph.py", "openai"), ADDS, [2]),
    (("with_langgraph.py", "anthropic"), ADDS, [2]),
    (("with_inspect_ai.py", "openai"), ADDS, [1, 2]),  # it asks the model for a greeting first
    (("with_inspect_ai.py", "anthropic"), ADDS, [2]),
    (("with_smolagents.py",), {"Observation": FINAL, "1+2": ASK}, [1, 1]),  # it rewrites each call as text
    (("with_mini_swe_agent.py",), {"1+2": SUBMIT}, [1]),
]

pytestmark = INSTALLED


def program_id(value):
    return "-".join(value).removeprefix("with_").replace(".py", "") if isinstance(value, tuple) else ""


async def turns_of_paths(program, answers):
    """Turns of each path of a rollout that is right, and trained exactly."""
    sessions = Sessions(EndpointConfig())
    try:
        trajectory = await roll(program, sessions, engine=FakeEngine(Answers(**answers)), limits=LIMITS)
    finally:
        await sessions.close()
    assert trajectory.reward == 1.0
    return [len(path.turns) for path in trajectory.paths]


@pytest.mark.parametrize(("program", "answers", "paths"), PROGRAMS, ids=program_id)
async def test_agent_of_a_package_is_trained_exactly(program, answers, paths, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    script, *arguments = program
    assert await turns_of_paths(command(str(PYTHON), str(HERE / script), *arguments), answers) == paths
