"""Checks of a model against the config, without a process."""

import contextlib
import json
import re

import pytest
import torch
from safetensors.torch import save_file

from agent_loop.programs.program import external
from async_rl.config import ConfigError, load_config
from async_rl.controller.preflight import check_run, model_problems
from async_rl.controller.resume import another_run, record_config
from async_rl.metrics import trackers
from recipes.calculator.model import TinyModelConfig, save_initial_checkpoint
from recipes.calculator.tokenizer import build_tokenizer
from tests.helpers import tiny_models


@pytest.fixture
def checkpoint(tmp_path):
    config = tiny_models.qwen3_moe_config(max_position_embeddings=4096, mlp_only_layers=[])
    return tiny_models.save_checkpoint(config, tmp_path, seed=0)


def problems(checkpoint, *overrides):
    return list(model_problems(load_config([f"model.checkpoint={checkpoint}", *overrides]), checkpoint))


LORA = ("trainer.lora.rank=4", "trainer.lora.target_modules=")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("cluster=ray", "engine.block_size=48"), None),
        (("cluster=ray", "engine.block_size=48", "engine.device=cpu"), "engine.block_size is 48"),
        (("engine.tensor_parallel=2",), None),
        (("engine.tensor_parallel=3",), "4 attention heads"),
        (("engine.tensor_parallel=4",), None),  # 2 key-value heads; an engine may repeat them
        ((LORA[0], f"{LORA[1]}[q_proj,down_proj]"), None),
        ((LORA[0], f"{LORA[1]}[q_proj,gate,w1]"), "has gate, w1, which .*q_proj, k_proj, v_proj, o_proj"),
    ],
)
def test_options_that_the_model_or_the_device_does_not_allow_are_refused(checkpoint, overrides, named):
    found = problems(checkpoint, *overrides)
    assert found == [] if named is None else re.search(named, found[0])


@pytest.mark.parametrize(("field", "value"), [("model_type", "granitemoe"), ("hidden_act", "gelu")])
def test_a_model_that_the_trainer_does_not_build_is_refused(checkpoint, field, value):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    (problem,) = problems(checkpoint)
    assert problem.startswith("model.checkpoint: ") and field in problem and f"'{value}'" in problem


def test_a_quantized_model_is_accepted_and_a_tensor_that_it_does_not_have_is_refused(checkpoint):
    tiny_models.quantize_fp8(checkpoint)
    assert problems(checkpoint) == []
    bias = "model.layers.2.self_attn.o_proj.bias"
    save_file({bias: torch.zeros(128)}, checkpoint / "model-3.safetensors")
    path = checkpoint / "model.safetensors.index.json"
    path.write_text(
        json.dumps({"weight_map": json.loads(path.read_text())["weight_map"] | {bias: "model-3.safetensors"}})
    )
    (problem,) = problems(checkpoint)
    assert problem.startswith(f"model.checkpoint is {checkpoint}") and bias in problem


SMALL_HEADS = ["engine.name is 'vllm'", "heads of 16 channels", "engine=sglang"]


@pytest.mark.parametrize(
    ("changes", "refused", "parts", "accepted"),
    [
        ({}, ["trainer.router_replay=R3"], ["trainer.router_replay is R3"], []),
        ({"head_dim": 16}, [], SMALL_HEADS, ["engine.device=cuda"]),
    ],
    ids=["routing replay", "heads that vLLM lacks on the CPU"],
)
def test_a_dense_model_is_refused_once_with_what_it_lacks(tmp_path, changes, refused, parts, accepted):
    dense = tiny_models.save_checkpoint(tiny_models.qwen3_dense_config(**changes), tmp_path, seed=0)
    (problem,) = problems(dense, *refused)
    assert all(part in problem for part in parts)
    assert problems(dense, *accepted) == []


def test_a_tracker_that_is_not_installed_is_refused_by_name(monkeypatch, tmp_path):
    config = load_config([f"output_dir={tmp_path}", "tracking.trackers=[trackio]"])
    assert check_run(config).warnings == (), "of a tiny model"
    monkeypatch.setitem(trackers.MODULES, "trackio", "no_such_package")
    with pytest.raises(ConfigError, match="'trackio', and the package no_such_package"):
        check_run(config)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((), "endpoint.run_key is None and endpoint.port is 0"),
        (("endpoint.run_key=k",), "endpoint.port is 0"),
        (("endpoint.run_key=k", "endpoint.port=4096"), None),
        (("endpoint.run_key=k", "endpoint.port=4096", "rollout.workers=2"), "rollout.workers=2"),
    ],
)
def test_agents_outside_of_the_run_need_a_key_and_an_address(overrides, named, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.agents.calculator.calculate", external)
    task = "task.factory=recipes.agents.calculator:agent_task"
    config = load_config([f"output_dir={tmp_path}", task, *overrides])
    with pytest.raises(ConfigError, match=named) if named else contextlib.nullcontext():
        check_run(config)


TASKS = """
from async_rl import Task

async def agent(prompt, access):
    return 1.0

def exact(completion, answer):
    return completion.text == answer

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
task = Task(prompts=ROWS, rewards=exact, validation=0.25, end_of_turn="<|im_end|>")
agent_gives_rewards = Task(prompts=ROWS, agent=agent, end_of_turn="<|im_end|>")
"""


@pytest.fixture
def own(tmp_path):
    """A function: task and overrides -> config of a run with its own checkpoint."""
    (tmp_path / "mine.py").write_text(TASKS)
    save_initial_checkpoint(tmp_path / "model", tokenizer=build_tokenizer(), seed=0, config=TinyModelConfig())

    def config(task, *overrides):
        factory = f"task.factory={tmp_path / 'mine.py'}:{task}"
        return load_config(["task=python", factory, f"model.checkpoint={tmp_path / 'model'}", *overrides])

    return config


def test_a_run_without_held_out_prompts_or_reward_function_is_accepted_and_validates_nothing(own, tmp_path):
    checked = check_run(own("agent_gives_rewards", f"output_dir={tmp_path / 'run'}"))
    assert checked.task.reward is None and not any(checked.held_out.values())
    assert [text for text in checked.warnings if "nothing is validated" in text]
    assert any(check_run(own("task", f"output_dir={tmp_path / 'run'}")).held_out.values())


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["optimizer.lr=1e-4"], ["optimizer.lr is 0.0001"]),
        (["optimizer.lr=1e-4", "trainer.lora.rank=4"], []),
        (["rollout.limits.max_tokens=511"], ["rollout.limits.max_tokens is 511"]),
        (["rollout.limits.max_new_tokens_per_turn=64"], ["max_new_tokens_per_turn is 64"]),
        (["validation.prompts=0"], ["validation.prompts is 0"]),
        (["cluster.gpus_per_rank=1", "engine.enforce_eager=true"], ["engine.enforce_eager is true"]),
        ([], []),
    ],
)
def test_settings_far_from_practice_are_warned_about(overrides, named, own, tmp_path):
    usual = (f"output_dir={tmp_path / 'run'}", "engine.max_model_len=512")
    warnings = check_run(own("task", *usual, *overrides)).warnings
    assert [part in line for part, line in zip(named, warnings, strict=True)] == [True] * len(named), warnings


@pytest.mark.parametrize("trace", ["journal/queue.sqlite", "checkpoints/step-000002/run.json"])
def test_the_folder_of_another_task_or_model_is_refused_at_the_start(trace, own, tmp_path):
    run = tmp_path / "run"
    first = own("task", f"output_dir={run}")
    (run / trace).parent.mkdir(parents=True)
    record_config(run, first, train_step=0)
    (run / trace).touch()
    assert list(another_run(first)) == []
    (line,) = another_run(own("agent_gives_rewards", f"output_dir={run}"))
    assert f"output_dir is {run}" in line and "mine.py:task" in line and "another output_dir" in line
    (line,) = another_run(load_config([f"output_dir={run}", "task=python", f"task.factory={first.task.factory}"]))
    assert "model.checkpoint" in line
