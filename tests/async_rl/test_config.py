"""Bad input is refused before any process starts, with the field, the value and the way out."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from async_rl.config import CONFIGS, RECIPES, ConfigError, RunConfig, load_config, recipe_overrides
from async_rl.files.config_classes import with_defaults
from async_rl.files.masking import dotted
from tests.helpers import tiny_models
from tests.helpers.losses import LOSSES, NAMES, OWN_FIELDS

TOP_LEVEL = sorted(p.stem for p in CONFIGS.glob("*.yaml"))
GROUPS = sorted((p.parent.name, p.stem) for p in CONFIGS.glob("*/*.yaml"))


@pytest.fixture
def dense_checkpoint(tmp_path):
    tiny_models.qwen3_dense_config(max_position_embeddings=4096).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_every_top_level_config_builds_a_run(name):
    assert load_config([], config_name=name).total_train_steps > 0


@pytest.mark.parametrize(("group", "choice"), GROUPS)
def test_every_choice_of_every_group_builds_a_run(group, choice, dense_checkpoint):
    dense = [f"model.checkpoint={dense_checkpoint}", "trainer.router_replay=none"]
    scale = ["model.checkpoint=/absent"]
    if choice.endswith(("_16", "_24", "_a22b")):
        scale.append("sync.directory=/weights")
    needed = {"hugging_face": dense, "python": ["task.factory=task.py:task"], "scale": scale}
    load_config([f"{group}={choice}", *needed.get(choice, needed.get(group, []))])


@pytest.mark.parametrize(
    "overrides",
    [
        *(f"rollout.resume_routing={mode}" for mode in ("append", "force", "replace", "split")),
        *(f"trainer.router_replay={mode}" for mode in ("R2", "none")),
        "total_train_steps=0 rollout.on_update=drain rollout.limits.max_refused_answers=0",
        "warm_start.steps=0 rollout.on_update=keep rollout.failure.max_retries=0 validation.prompts=0",
        "rollout.failure.max_fills=2 rollout.failure.on_failed=fill",
        "staleness=recycle staleness.max_requeues=2 sync.every=2 resume=never",
        "optimizer.lr=1e-6",
        "sync.directory=/tmp sync.route=folder",
        "sync.directory=s3://bucket/prefix sync.route=folder sync.delta=true",
        "trainer.ranks=2 trainer.parallel.tensor=2 trainer.recompute=full trainer.packing=false",
        "loss.kl_estimator=k2 loss.kl_coefficient=0.1",
        "trainer.lora.rank=4 trainer.lora.alpha=8 trainer.lora.target_modules=[q_proj,v_proj]",
        "loss=gspo loss.name=decoupled_ppo",
        "engine.device=cuda engine.enforce_eager=false",
        "cluster=ray engine.enforce_eager=false",
        "advantage.name=gae rollout.trajectories_per_group=1 critic.updates=2 critic.value_clip=0.2",
    ],
)
def test_overrides_that_have_an_effect_are_accepted(overrides):
    load_config(overrides.split())


def without(values, name):
    """A nested mapping without the value of a dotted name."""
    first, _, rest = name.partition(".")
    return {k: v for k, v in values.items() if k != first} | ({first: without(values[first], rest)} if rest else {})


def plain(value):
    return json.loads(json.dumps(value, default=str))


OF_SEVERAL = ("model", "scale", "algorithm")
"""Folders whose presets have values of several groups."""


@pytest.mark.parametrize(("group", "name"), [("", name) for name in TOP_LEVEL] + GROUPS)
def test_a_preset_holds_only_values_that_differ_from_the_defaults(group, name):
    values = yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text()) or {}
    values.pop("defaults", None)
    values = values if group in ("", *OF_SEVERAL) else {group: values}
    run = yaml.safe_load((CONFIGS / "run.yaml").read_text())
    changed_back = dict(dotted(run)) if group in ("scale", "algorithm") else {}  # may return to the default
    full = plain(with_defaults(RunConfig, values))
    keys = [key for key, value in dotted(values) if value != {}]
    repeated = [key for key in keys if plain(with_defaults(RunConfig, without(values, key))) == full]
    assert [key for key in repeated if key not in changed_back] == []


def values_of(config):
    return plain(asdict(config))


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("rollout.workers=2", {"rollout": {"workers": 2}}),
        ("+rollout.workers=2", {"rollout": {"workers": 2}}),
        ("++rollout.workers=2", {"rollout": {"workers": 2}}),
        ("rollout={workers: 2}", {"rollout": {"workers": 2}}),
        ("seed=3", {"seed": 3, "engine": {"seed": 3}, "trainer": {"seed": 3}}),
        ("rollout.sampling.temperature=0.5", {"rollout": {"sampling": {"temperature": 0.5}}}),
        ("~checkpoint.every", {"checkpoint": {"every": 0}}),
        ("cluster.rank_env.NCCL_DEBUG=INFO", {"cluster": {"rank_env": {"NCCL_DEBUG": "INFO"}}}),
        ("+cluster.rank_env.NCCL_NTHREADS=64", {"cluster": {"rank_env": {"NCCL_NTHREADS": "64"}}}),
    ],
)
def test_an_override_changes_its_field_and_no_other(override, changed):
    def merged(old, new):
        return {k: merged(v, new[k]) if isinstance(new.get(k), dict) else new.get(k, v) for k, v in (new | old).items()}

    assert values_of(load_config([override])) == merged(values_of(load_config([])), changed)


def test_an_algorithm_has_its_own_sizes_of_groups_next_to_a_recipe():
    recipe, algorithm = RECIPES / "long_tail" / "recipe.yaml", ["algorithm=flash_reinforce"]
    chosen, own = (load_config([*recipe_overrides(recipe, given), *given]).rollout for given in (algorithm, []))
    assert (chosen.groups_per_batch, chosen.trajectories_per_group) == (256, 1)
    assert (own.groups_per_batch, own.trajectories_per_group) == (8, 8)


def test_an_override_chooses_a_preset_of_a_folder_of_configs(tmp_path):
    shutil.copytree(CONFIGS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "safe.yaml").write_text("fsync: true\n")
    config = tmp_path / "run.yaml"
    config.write_text(config.read_text().replace("defaults:\n", "defaults:\n  - optional journal: null\n"))
    assert load_config(["journal=safe"], config_dir=tmp_path).journal.fsync
    assert not load_config(["journal.fsync=false"], config_dir=tmp_path).journal.fsync


BAD = [  # overrides, parts of the error
    ("rollout.wokers=2", "rollout.wokers", "rollout.workers"),
    ("rollout.sampling={temperatur:1}", "rollout.sampling.temperatur", "rollout.sampling.temperature"),
    ("hydra.wish=1", "hydra.wish"),
    ("rollout.workers.wish=1", "rollout.workers is {'wish': 1}"),
    ("output_dir=${wish}", "output_dir", "wish"),
    ("total_train_steps=-1", "total_train_steps", "-1"),
    ("rollout.on_update=hope", "rollout.on_update", "hope"),
    ("rollout.trajectories_per_group=1", "rollout.trajectories_per_group", "advantage.name=grpo"),
    ("rollout.kv=keep", "rollout.kv", "rollout.on_update=resume"),
    ("rollout.resume_routing=force trainer.router_replay=none", "rollout.resume_routing", "router_replay"),
    ("engine=sglang engine.kv_cache_tokens=5", "engine.kv_cache_tokens", "5"),
    ("engine=sglang engine.block_size=32", "engine.block_size"),
    ("rollout.groups_per_batch=0", "rollout.groups_per_batch", "0"),
    ("rollout.sampling.temperature=-1", "temperature", "-1"),
    ("rollout.sampling.temperature=0.001", "temperature", "0.001"),
    ("rollout.sampling.top_p=2", "top_p", "2"),
    ("rollout.sampling.min_p=1", "min_p", "1"),
    ("rollout.sampling.min_p=-0.1", "min_p", "-0.1"),
    ("engine=sglang rollout.sampling.top_k=20000", "rollout.sampling.top_k", "20000", "sglang"),
    ("engine=sglang validation.sampling.top_k=20000", "validation.sampling.top_k", "20000", "sglang"),
    ("validation.sampling.temperatur=1", "validation.sampling.temperatur", "temperature"),
    ("validation.samples=0", "validation.samples", "0"),
    ("validation.prompts=0 validation.samples=2", "validation.samples is 2", "validation.prompts"),
    ("validation.prompts=0 validation.sampling.top_k=2", "validation.sampling", "validation.prompts"),
    ("sync.every=3 staleness.max_staleness=1", "staleness.max_staleness", "1", "sync.every=3"),
    ("rollout.failure.on_failed=fill rollout.failure.max_fills=9", "max_fills is 9", "per_group=8"),
    ("rollout.drop_without_spread=-1", "rollout.drop_without_spread", "-1"),
    ("rollout.drop_without_spread=8 advantage.name=reinforce_plus_plus", "without_spread is 8", "advantage.name"),
    ("advantage.name=gae rollout.drop_without_spread=8", "without_spread is 8", "advantage.name=gae"),
    ("advantage.name=gae advantage.lam=2", "advantage.lam is 2", "<= 1"),
    ("advantage.lam=0.9", "advantage.name is missing"),
    ("advantage.name=rloo advantage.lam=0.9", "advantage.lam"),
    ("critic.updates=2", "critic.updates is 2", "advantage.name=gae"),
    ("critic.optimizer.lr=1e-4", "critic.optimizer", "advantage.name=gae"),
    ("advantage.name=gae critic.updates=0", "critic.updates is 0", ">= 1"),
    ("advantage.name=gae critic.coefficient=1", "critic.coefficient is 1", "critic.trunk=shared"),
    ("advantage.name=gae critic.trunk=shared critic.updates=2", "critic.updates is 2", "critic.trunk=own"),
    ("advantage.name=gae critic.trunk=shared critic.checkpoint=/tmp", "critic.checkpoint is /tmp", "critic.trunk=own"),
    ("advantage.name=gae critic.checkpoint=/tmp/none", "critic.checkpoint is /tmp/none", "config.json"),
    ("advantage.name=gae critic.warmup_steps=60", "critic.warmup_steps is 60", "total_train_steps"),
    ("advantage.name=gae critic.optimizer.warmup_steps=60", "critic.optimizer.warmup_steps is 60", "critic.updates"),
    ("advantage.name=gae critic.optimizer.cpu_offload=1", "critic.optimizer.cpu_offload is 1"),
    ("schedule=plan rollout.workers=2", "rollout.workers is 2", "schedule"),
    ("schedule=plan rollout.drop_without_spread=8", "rollout.drop_without_spread is 8", "schedule=plan"),
    ("schedule=plan staleness=drop", "staleness.policy is 'drop'", "schedule=plan"),
    ("sync.route=folder", "sync.route", "sync.directory"),
    ("sync.directory=/tmp", "sync.directory", "/tmp", "sync.route=folder"),
    ("sync.max_paused=2", "sync.max_paused", "2", "sync.mode=rolling"),
    ("sync.max_paused=0", "sync.max_paused", "0", ">= 1"),
    ("sync.mode=rolling sync.max_paused=2 engine.replicas=2", "max_paused is 2", "replicas=2", "mode=at_once"),
    ("staleness.max_requeues=2", "staleness.max_requeues is 2", "staleness=recycle"),
    ("rollout.failure.max_fills=2", "rollout.failure.max_fills is 2", "rollout.failure.on_failed=fill"),
    ("mismatch.prompts=0 mismatch.tokens=8", "mismatch.tokens is 8", "mismatch.prompts"),
    ("cluster=ray cluster.num_cpus=8", "cluster.num_cpus is 8", "cluster.address"),
    ("cluster=ray cluster.object_store_bytes=8", "cluster.object_store_bytes is 8", "cluster.address"),
    ("loss=tis loss.mask_low=0.5", "loss.mask_low"),
    ("loss.kl_in=reward", "loss.kl_in is reward", "loss.kl_coefficient"),
    ("loss.kl_coefficient=0.1 loss.kl_in=reward loss.kl_estimator=k1", "loss.kl_estimator is k1"),
    ("loss.kl_estimator=k2", "loss.kl_estimator is k2", "loss.kl_coefficient"),
    ("trainer.peak_flops=0", "trainer.peak_flops", "> 0"),
    ("trainer.replay_threshold=1.5", "trainer.replay_threshold", "1.5", "<= 1"),
    ("trainer.replay_threshold=0.5 trainer.router_replay=none", "replay_threshold=0", "router_replay"),
    ("trainer.lora.rank=-1", "trainer.lora.rank", "-1"),
    ("trainer.lora.rank=4 trainer.lora.alpha=0", "trainer.lora.alpha", "0"),
    ("trainer.lora.alpha=8", "trainer.lora.alpha is 8", "trainer.lora.rank > 0"),
    ("trainer.lora.target_modules=[q_proj]", "trainer.lora.target_modules", "trainer.lora.rank > 0"),
    ("trainer.lora.rank=4 trainer.lora.target_modules=[q_proj,q_proj]", "target_modules", "q_proj twice"),
    ("trainer.lora.rank=4 optimizer.cpu_offload=0.5", "optimizer.cpu_offload is 0.5", "trainer.lora.rank=4"),
    ("trainer.lora.rank=4 trainer.dtype=bfloat16 trainer.layer_spec=transformer_engine", "layer_spec", "rank=4"),
    ("engine.enforce_eager=false", "enforce_eager"),
    ("engine.device=cpu cluster.gpus_per_replica=1", "cluster.gpus_per_replica is 1", "engine.device=cpu"),
    ("engine.device=cuda cluster.gpus_per_replica=0", "cluster.gpus_per_replica is 0", "engine.device=cuda"),
    ("cluster=ray cluster.gpus_per_replica=0.5", "engine.gpu_memory_utilization is 0.85", "0.5 of a GPU"),
    ("optimizer.lr=10", "optimizer.lr is 10", "must be < 1"),
    ("optimizer.warmup_steps=60", "optimizer.warmup_steps is 60", "total_train_steps=60"),
    ("staleness=synchronous staleness.max_staleness=2", "staleness.max_staleness=2", "staleness=wait"),
    ("rollout.sampling.temperature=0", "rollout.sampling.temperature is 0", "validation.sampling.temperature=0"),
    ("cluster.gpus_per_replica=1 engine.tensor_parallel=2", "gpus_per_replica is 1", "tensor_parallel=2"),
    ("cluster.gpus_per_replica=2 engine.tensor_parallel=2 engine.data_parallel=2", "data_parallel=2"),
    ("cluster.gpus_per_replica=2.5 engine.tensor_parallel=2", "replica is 2.5", "tensor_parallel=2"),
    (
        "cluster.gpus_per_replica=3 engine.tensor_parallel=2 engine.nodes=2 sync.route=broadcast",
        "replica is 3",
        "nodes=2",
    ),
    ("engine.tensor_parallel=2 engine.nodes=2", "engine.nodes is 2", "sync.route=memory", "broadcast"),
    ("engine.tensor_parallel=2 engine.nodes=2 sync.route=broadcast cluster.replica_env.VLLM_HOST_IP=a", "sets VLLM"),
    ("cluster.gpus_per_replica=1.5", "cluster.gpus_per_replica is 1.5"),
    ("cluster.gpus_per_replica=-1", "cluster.gpus_per_replica is -1"),
    ("+cluster.rank_env.OMP_NUM_THREADS=4", "cluster.rank_env", "OMP_NUM_THREADS"),
    ("+cluster.replica_env.VLLM_USE_V2_MODEL_RUNNER=0", "cluster.replica_env", "VLLM_USE_V2_MODEL_RUNNER"),
    ("engine=sglang +cluster.replica_env.CUDA_VISIBLE_DEVICES=0", "cluster.replica_env", "CUDA_VISIBLE"),
    ("+cluster.rank_env.NCCL_DEBUG=[1]", "cluster.rank_env.NCCL_DEBUG"),
    ("engine.block_size=33", "block_size", "33"),
    ("optimizer.decay_steps=0", "optimizer.decay", "decay_steps=0"),
    ("warm_start.optimizer.decay_steps=0 total_train_steps=0", "optimizer.decay", "decay_steps=0"),
    ("loss.name=wish", "loss.name", "wish", "decoupled_ppo"),
    ("loss.clip_low=wish", "loss.clip_low", "wish"),
    ("loss.temperature=0.5", "loss.temperature", "rollout.sampling.temperature"),
    ("trainer.updates_per_batch=2 staleness.max_staleness=0", "max_staleness is 0", "per_batch=2", "to 3"),
    ("trainer.updates_per_batch=2 sync.every=3", "sync.every is 3", "trainer.updates_per_batch=2"),
    ("trainer.updates_per_batch=2 total_train_steps=3", "total_train_steps is 3", "updates_per_batch=2"),
    ("trainer.updates_per_batch=5 staleness.max_staleness=9", "groups_per_batch is 32", "per_batch=5"),
    ("trainer.updates_per_batch=32 total_train_steps=64 staleness.max_staleness=31 trainer.ranks=16", "16 data-"),
    ("rollout.groups_per_batch=3 rollout.trajectories_per_group=3 trainer.ranks=2", "9", "2"),
    ("model=hugging_face", "model.checkpoint"),
    ("task.factory=nonsense", "task.factory", "nonsense"),
    ("+wish=1", "wish"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[0][:48])
def test_bad_input_is_refused_naming_field_and_value(case):
    overrides, *parts = case
    with pytest.raises(ConfigError) as caught:
        load_config(overrides.split())
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2, "one clear error, not a page"


@pytest.mark.parametrize("name", NAMES)
def test_the_preset_of_a_loss_is_its_class_with_its_defaults(name):
    assert load_config([f"loss={name}"]).loss == LOSSES[name]()


@pytest.mark.parametrize("name", NAMES)
def test_a_key_of_another_loss_is_refused_by_name(name):
    foreign = {field for own in OWN_FIELDS.values() for field in own if field not in OWN_FIELDS[name]}
    with pytest.raises(ConfigError) as caught:
        load_config([f"loss={name}", *(f"+loss.{field}=1" for field in sorted(foreign))])
    assert set(re.findall(r"loss\.(\w+)", str(caught.value))) == foreign


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ([], 0),
        (["engine.device=cuda"], 1),
        (["engine.device=cuda", "engine.tensor_parallel=4"], 4),
        (["engine.device=cuda", "engine.tensor_parallel=4", "engine.data_parallel=2"], 8),
        (["engine.tensor_parallel=4"], 0),
        (["cluster=ray", "engine.tensor_parallel=2"], 2),
        (["cluster=ray", "engine.device=cpu", "engine.tensor_parallel=2"], 0),
        (["cluster=ray", "cluster.gpus_per_replica=0.5", "engine.gpu_memory_utilization=0.4"], 0.5),
        (["cluster=ray", "cluster.gpus_per_replica=4", "engine.tensor_parallel=2"], 4),
    ],
)
def test_gpus_of_a_replica_follow_from_the_device_and_its_ranks(overrides, gpus):
    assert load_config(overrides).gpus_per_replica == gpus


def test_paths_of_a_config_are_absolute(dense_checkpoint, monkeypatch):
    monkeypatch.chdir(dense_checkpoint)
    (dense_checkpoint / "run.json").touch()
    config = load_config(
        [
            *("model=hugging_face", "model.checkpoint=.", "trainer.router_replay=none", "engine=sglang"),
            *("output_dir=runs/one", "resume=.", "schedule=plan", "task.prompt_file=prompts.jsonl"),
            *("sync.route=folder", "sync.directory=weights", "warm_start.cache=warm", "engine.python=bin/python"),
        ]
    )
    found = {name: value for name, value in dotted(asdict(config)) if isinstance(value, Path)}
    assert {name: str(path.relative_to(dense_checkpoint)) for name, path in found.items()} == {
        "output_dir": "runs/one",
        "resume": ".",
        "schedule": "plan",
        "model.checkpoint": ".",
        "model.cache": "outputs/dequantized",
        "engine.python": "bin/python",
        "sync.directory": "weights",
        "warm_start.cache": "warm",
        "task.prompt_file": "prompts.jsonl",
    }


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "file:///shared/weights", "simplecache::gs://bucket/a"])
def test_a_url_of_a_config_stays_unchanged(url):
    assert load_config(["sync.route=folder", f"sync.directory={url}"]).sync.directory == url


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*/recipe.yaml")), ids=lambda path: path.parent.name)
def test_every_recipe_builds_a_run_and_can_be_synchronous(recipe):
    assert load_config(recipe_overrides(recipe)).total_train_steps > 0
    own = ["staleness=synchronous"]
    assert load_config([*recipe_overrides(recipe, own), *own]).staleness.max_staleness == 0


@pytest.mark.parametrize("content", [None, "cells: {}", "overrides: 3", "["])
def test_a_recipe_that_is_none_is_refused_with_its_path(tmp_path, content):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"--recipe.*recipe\.yaml"):
        recipe_overrides(path)


def test_all_contradictions_between_fields_are_refused_together():
    with pytest.raises(ConfigError) as caught:
        load_config(["rollout.limits.max_tokens=5000", "total_train_steps=3", "trainer.updates_per_batch=2"])
    assert [line.partition(" is ")[0] for line in str(caught.value).splitlines()] == [
        "total_train_steps",
        "rollout.limits.max_tokens",
    ]


def test_validation_samples_as_the_rollouts_unless_it_has_sampling_of_its_own():
    config = load_config(["rollout.sampling.top_k=5"])
    assert config.validation_sampling == config.rollout.sampling and config.captures_support
    greedy = load_config(["validation.sampling.temperature=0", "rollout.sampling.top_k=5"])
    assert (greedy.validation_sampling.temperature, greedy.validation_sampling.top_k) == (0.0, -1)
    assert not load_config(["validation.sampling.temperature=0"]).captures_support
    assert load_config(["validation.sampling.top_p=0.9"]).captures_support, "the engines are started for both"


@pytest.mark.parametrize(
    ("overrides", "walks"),
    [
        ([], False),
        (["mismatch.verify=every_token"], True),
        (["loss=gspo", "loss.ratio=separated"], True),
        (["mismatch.verify=every_token", "mismatch.max_k3=1e-3", "mismatch.prompts=0"], True),
    ],
)
def test_old_logprobs_are_computed_for_the_check_of_every_token_and_for_losses_that_name_them(overrides, walks):
    assert load_config(overrides).walks_versions == walks
