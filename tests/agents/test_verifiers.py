"""A task of verifiers on a fake engine. Verifiers renders and reads tokens itself."""

import os
from pathlib import Path

import pytest

from agent_loop.programs.endpoint.config import EndpointConfig
from agent_loop.programs.endpoint.host import Sessions
from agent_loop.programs.program import command
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import build_tokenizer
from tests.agent_loop.endpoint.test_programs import PROMPT, make_loop
from tests.agent_loop.test_session import Answers, check_exact
from tests.agents.test_agents import ADDS, HERE, LIMITS
from tests.helpers.fakes import SPEC, FakeEngine

PYTHON = Path(os.environ.get("VERIFIERS_PYTHON", HERE.parent.parent / ".venv-verifiers/bin/python")).absolute()


@pytest.mark.skipif(not PYTHON.exists(), reason="verifiers is not installed (make setup-agents)")
async def test_task_of_verifiers_is_trained_exactly_through_tokens(tmp_path, monkeypatch):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])  # the renderer of Qwen3 demands them
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("TOKENIZER", str(tmp_path))
    sessions, engine = Sessions(EndpointConfig()), FakeEngine(Answers(**ADDS))
    trajectory = Trajectory(routing=SPEC)
    loop = make_loop(command(str(PYTHON), str(HERE / "with_verifiers.py")), sessions, engine, limits=LIMITS)
    try:
        await loop.run(PROMPT, trajectory=trajectory, session="g0-t0", cache_salt="v0")
    finally:
        await sessions.close()
    assert trajectory.reward == 1.0
    assert [len(path.turns) for path in trajectory.paths] == [2]
    check_exact(trajectory, engine)
