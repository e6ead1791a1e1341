"""A task of verifiers on a fake engine. Verifiers renders and reads tokens itself."""

import os
from pathlib import Path

import pytest

from agent_loop.programs.program import command
from recipes.calculator.tokenizer import build_tokenizer
from tests.agents.test_agents import ADDS, HERE, turns_of_paths

PYTHON = Path(os.environ.get("VERIFIERS_PYTHON", HERE.parent.parent / ".venv-verifiers/bin/python")).absolute()


@pytest.mark.skipif(not PYTHON.exists(), reason="verifiers is not installed (make setup-agents)")
async def test_task_of_verifiers_is_trained_exactly_through_tokens(tmp_path, monkeypatch):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])  # the renderer of Qwen3 demands them
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("TOKENIZER", str(tmp_path))
    assert await turns_of_paths(command(str(PYTHON), str(HERE / "with_verifiers.py")), ADDS) == [2]
