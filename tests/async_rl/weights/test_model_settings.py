"""Settings that follow from checkpoint, task and machine."""

import pytest

from async_rl.config import ConfigError, composed_values, load_config
from async_rl.weights.model_settings import has_gpus, local_checkpoint, model_name, run_name
from tests.helpers import tiny_models


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Kind -> folder with the config of a checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.qwen3_dense_config(max_position_embeddings=2048).save_pretrained(folder / "dense")
    tiny_models.qwen3_moe_config(max_position_embeddings=1 << 15).save_pretrained(folder / "experts")
    return {kind: folder / kind for kind in ("dense", "experts")}


def own(model, *more):
    return load_config(["task=python", "task.factory=a/products.py:task", f"model.checkpoint={model}", *more])


def test_a_checkpoint_brings_the_settings_of_a_trained_model(models):
    dense, experts = own(models["dense"]), own(models["experts"])
    assert (dense.trainer.router_replay, experts.trainer.router_replay) == ("none", "R3")
    assert (dense.engine.max_model_len, experts.engine.max_model_len) == (2048, 4096)
    assert dense.rollout.limits.max_tokens == 2048
    assert dense.warm_start.steps == 0 and dense.optimizer.lr == 1e-6 and dense.optimizer.decay == "constant"
    assert dense.name == "products-dense" and dense.output_dir.name == "products-dense"
    assert min(dense.engine.start_timeout_s, dense.engine.load_timeout_s, dense.sync.timeout_s) >= 1800


def test_given_values_stay(models):
    config = own(models["dense"], "engine.max_model_len=512", "optimizer.lr=3e-6", "name=mine", "trainer.lora.rank=4")
    assert (config.engine.max_model_len, config.rollout.limits.max_tokens) == (512, 512)
    assert (config.optimizer.lr, config.name) == (3e-6, "mine")
    assert own(models["dense"], "trainer.lora.rank=4").optimizer.lr == 1e-5


@pytest.mark.parametrize("task", [["task=calculator"], []])
def test_no_setting_of_the_tiny_model_reaches_a_checkpoint(models, task):
    config = load_config([*task, f"model.checkpoint={models['experts']}"])
    assert config.optimizer.lr == 1e-6 and config.rollout.limits.max_tokens == 4096 and config.warm_start.steps == 0


def test_the_warm_up_is_never_longer_than_the_run(models):
    for steps, warmup in ((0, 0), (5, 0), (50, 5), (500, 10)):
        assert own(models["dense"], f"total_train_steps={steps}").optimizer.warmup_steps == warmup


def test_a_checkpoint_that_cannot_be_read_is_left_to_the_checks(tmp_path):
    assert composed_values(["task=python", "task.factory=x.py:task", f"model.checkpoint={tmp_path}"])["model"]


@pytest.mark.parametrize(
    "factory, checkpoint, name",
    [
        ("/a/products.py:task", "/m/Qwen3-0.6B", "products-Qwen3-0.6B"),
        ("/a/products.py:hard", "Qwen/Qwen3-0.6B@main", "products-hard-Qwen3-0.6B"),
        ("/a/sums/task.py:task", "/hub/models--Qwen--Qwen3-8B/snapshots/c1899de", "sums-Qwen3-8B"),
        ("recipes.calculator.task:calculator_task", None, "calculator"),
        ("my tasks.py:task", "/m/a b", "my-tasks-a-b"),
        ("task.py:task", "/m/x", "task-x"),
        ("/a/outputs/task-x/task.pkl:task", "/m/x", "task-x"),
    ],
)
def test_a_run_is_named_after_its_task_and_its_model(factory, checkpoint, name):
    assert run_name(factory, checkpoint) == name


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache of the hub, without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_name_at_the_hub_is_found_in_its_cache_without_a_network(hub):
    folder = hub / "models--Qwen--Tiny"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    for name in ("Qwen/Tiny", "Qwen/Tiny@main"):
        assert local_checkpoint(name, key="model.checkpoint") == snapshot
    assert model_name(str(snapshot)) == "Tiny"


@pytest.mark.parametrize("name", ["Qwen/Tiny", "Qwen/Tiny@v2"])
@pytest.mark.parametrize("key", ["model.checkpoint", "critic.checkpoint", "teachers.tutor.checkpoint"])
@pytest.mark.usefixtures("hub")
def test_a_name_that_the_hub_does_not_give_is_refused_with_the_ways_out(key, name):
    with pytest.raises(ConfigError) as caught:
        load_config([f"{key}={name}"])
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{key} is {name}") and "hf download Qwen/Tiny" in line and "HF_TOKEN" in line


def test_a_folder_comes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Tiny").mkdir(parents=True)
    assert local_checkpoint("Qwen/Tiny", key="model.checkpoint").samefile(tmp_path / "Qwen" / "Tiny")


def test_gpus_are_seen_without_torch(tmp_path):
    assert not has_gpus({}, tmp_path)
    for name in ("nvidiactl", "nvidia0"):
        (tmp_path / name).touch()
    assert has_gpus({}, tmp_path) and has_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)
    assert not has_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)


def test_processes_use_the_gpus_that_are_reserved_for_them_and_no_others(models):
    on_gpus = own(models["dense"], "cluster.gpus_per_rank=1")
    assert (on_gpus.engine.device, on_gpus.gpus_per_replica) == ("cuda", 1)
    assert (on_gpus.trainer.dtype, on_gpus.engine.dtype) == ("bfloat16", "bfloat16")
    assert on_gpus.engine.is_eager("cuda") is False
    engine_on_cpu = own(models["dense"], "cluster.gpus_per_rank=1", "cluster.gpus_per_replica=0")
    assert engine_on_cpu.engine.device == "cpu"
    assert own(models["dense"]).engine.device == "cpu"


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("model.checkpoint=5", "model.checkpoint"),
        ("model.checkpoint=[a]", "model.checkpoint"),
        ("task.factory=5", "task.factory"),
        ("optimizer.lr=fast", "optimizer.lr"),
        ("trainer.lora.rank=x", "trainer.lora.rank"),
        ("total_train_steps=many", "total_train_steps"),
        ("total_train_steps=-5", "total_train_steps"),
        ("cluster.address=5", "cluster.address"),
    ],
)
@pytest.mark.parametrize("base", [[], ["model.checkpoint=/absent"]], ids=["toy", "model"])
def test_a_wrong_value_is_named_by_its_own_field_first(override, field, base):
    with pytest.raises(ConfigError) as refused:
        load_config(["task=python", "task.factory=a/products.py:task", *base, override])
    assert str(refused.value).startswith(f"{field} is ")
