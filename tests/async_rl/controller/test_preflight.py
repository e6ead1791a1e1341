"""Checks of a model against the config, without a process."""

import contextlib
import json

import pytest

from agent_loop.program import external
from async_rl.config import ConfigError, load_config
from async_rl.controller.preflight import check_run, model_problems
from async_rl.metrics import trackers
from tests.helpers import tiny_models


@pytest.fixture
def checkpoint(tmp_path):
    config = tiny_models.qwen3_moe_config(max_position_embeddings=4096, dense_layers=())
    return tiny_models.save_checkpoint(config, tmp_path, seed=0)


def problems(checkpoint, *overrides):
    return list(model_problems(load_config([f"model.checkpoint={checkpoint}", *overrides]), checkpoint))


def test_rules_about_the_device_wait_for_a_device_of_another_machine(checkpoint):
    assert problems(checkpoint, "cluster=ray", "engine.block_size=48") == []
    (problem,) = problems(checkpoint, "cluster=ray", "engine.block_size=48", "engine.device=cpu")
    assert "engine.block_size is 48" in problem


@pytest.mark.parametrize(("field", "value"), [("model_type", "granitemoe"), ("hidden_act", "gelu")])
def test_a_model_that_the_trainer_does_not_build_is_refused(checkpoint, field, value):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    (problem,) = problems(checkpoint)
    assert problem.startswith("model.checkpoint: ") and field in problem and f"'{value}'" in problem


def test_a_dense_model_is_refused_once_with_routing_replay(tmp_path):
    dense = tiny_models.save_checkpoint(tiny_models.qwen3_dense_config(), tmp_path, seed=0)
    (problem,) = problems(dense)
    assert "trainer.router_replay is R3" in problem
    assert problems(dense, "trainer.router_replay=none") == []


def test_lora_targets_that_the_model_lacks_are_refused_with_those_that_it_has(checkpoint):
    assert problems(checkpoint, "trainer.lora.rank=4", "trainer.lora.target_modules=[q_proj,down_proj]") == []
    (problem,) = problems(checkpoint, "trainer.lora.rank=4", "trainer.lora.target_modules=[q_proj,gate,w1]")
    assert "trainer.lora.target_modules has gate, w1" in problem and "q_proj, k_proj, v_proj, o_proj" in problem


@pytest.mark.parametrize(("size", "named"), [(2, None), (3, "4 attention heads"), (4, None)])
def test_the_tensor_parallel_size_of_an_engine_divides_the_heads(checkpoint, size, named):
    found = problems(checkpoint, f"engine.tensor_parallel={size}")  # 2 key-value heads, which an engine may repeat
    assert found == [] if named is None else named in found[0]


def test_a_tracker_that_is_not_installed_is_refused_by_name(monkeypatch, tmp_path):
    config = load_config([f"output_dir={tmp_path}", "tracking.trackers=[trackio]"])
    check_run(config)
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
