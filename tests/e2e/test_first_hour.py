"""The first jobs of a user, with a wheel in an empty folder, by copy and paste from the docs."""

import json
import shlex

import pytest
from transformers import AutoModelForCausalLM

from tests.docs.pages import ROOT, commands, module_of
from tests.e2e.runs import python
from tests.helpers import tiny_models, tokenizers_of_families
from tests.helpers.wheel import environment_of, install_wheel

SMALL = (
    "total_train_steps=1",
    "rollout.groups_per_batch=2",
    "rollout.trajectories_per_group=2",
    "engine.max_model_len=512",
    "engine.max_num_seqs=8",
    "rollout.limits.max_new_tokens_per_turn=8",
    "rollout.limits.max_turns=2",
    "validation.prompts=2",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Folder with the content of the wheel."""
    return install_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def folder(tmp_path):
    """An empty folder, with a checkpoint next to it."""
    tokenizer = tokenizers_of_families.build("qwen")
    config = tiny_models.qwen3_dense_config(vocab_size=len(tokenizer), max_position_embeddings=4096)
    tokenizer.save_pretrained(tiny_models.save_checkpoint(config, tmp_path / "model", seed=0))
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def command_of(page, *words):
    """The first documented command with these words, without the name of the program."""
    text = (ROOT / page).read_text()
    found = next(command for command in commands(text) if all(word in command for word in words))
    _, _, arguments = found.partition(" run ") if found.startswith("async-rl") else found.partition("async_rl.run ")
    return shlex.split(arguments)


def run(installed, folder, arguments, *more):
    """Run in the folder with the wheel alone; returns what it printed."""
    given = ["../model" if word == "PATH" else word.replace("=PATH", "=../model") for word in arguments]
    return python("-m", "async_rl", *more[:1], *given, *more[1:], cwd=folder, env=environment_of(installed)).stdout


def assert_trained(directory):
    """Returns the metrics of the only step."""
    (step,) = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    assert step["train_step"] == 1
    AutoModelForCausalLM.from_pretrained(directory / "final")
    assert (directory / "report.html").is_file() and (directory / "rollouts.html").is_file()
    return step


def test_the_task_of_the_readme_trains_a_checkpoint(installed, folder):
    (folder / "products.py").write_text(module_of("README.md", "products.py"))
    run(installed, folder, command_of("README.md", "--task products.py", "=PATH"), "run", *SMALL)
    assert "info/tool_calls" in assert_trained(folder / "outputs" / "products-model")


def test_an_agent_that_returns_its_reward_trains_a_checkpoint(installed, folder):
    page = "docs/guides/agent.md"
    (folder / "calculator_agent.py").write_text(module_of(page, "calculator_agent.py"))
    shown = run(installed, folder, command_of(page, "--task calculator_agent.py"), "run", *SMALL)
    assert "nothing is validated" in shown
    assert_trained(folder / "outputs" / "calculator_agent-model")


def test_one_gpu_is_checked_with_its_memory(installed, folder):
    (folder / "products.py").write_text(module_of("README.md", "products.py"))
    given = command_of("docs/guides/cluster.md", "scale=one_gpu")
    given = [word if not word.startswith("model.checkpoint=") else "model.checkpoint=PATH" for word in given]
    shown = run(installed, folder, given, "check")
    assert "activations" in shown and "left for K/V" in shown and "bfloat16" in shown and "warning" not in shown
    assert not (folder / "outputs").exists()
