"""Teachers in the config: names that the user chooses, engines that follow that of the run, and what is refused."""

from dataclasses import asdict
from pathlib import Path

import pytest

from async_rl.config import ConfigError, RunConfig, build_config, load_config, plain_values
from async_rl.files.config_classes import all_keys
from async_rl.inference.sglang.config import SglangConfig
from async_rl.inference.vllm.config import VllmConfig

TEACHER = "teachers.math.checkpoint=/models/math"


def test_a_run_has_no_teachers_and_no_term():
    config = load_config([])
    assert config.teachers == {} and config.teaches is None and config.gpus_of_teachers == []


@pytest.mark.parametrize("plus", ["", "+"])
def test_a_teacher_is_named_on_the_command_line(plus):
    config = load_config([f"{plus}{TEACHER}", "engine.dtype=bfloat16", "engine.replicas=3", "engine.max_model_len=512"])
    engine = config.teachers["math"].engine
    assert isinstance(engine, VllmConfig)
    assert (engine.dtype, engine.max_model_len, engine.device, engine.replicas) == ("bfloat16", 512, "cpu", 1)
    assert config.teaches == config.distillation and config.gpus_of_teachers == [("math", 0.0)]


def test_the_engine_of_a_teacher_may_be_another_one():
    given = [
        "teachers.math.engine.name=sglang",
        "teachers.math.engine.replicas=2",
        "teachers.math.engine.dtype=float16",
    ]
    config = load_config([TEACHER, "teachers.code.checkpoint=code", *given])
    assert isinstance(config.teachers["math"].engine, SglangConfig)
    assert (config.teachers["math"].engine.dtype, config.engine.dtype) == ("float16", "float32")
    assert config.teachers["math"].engine.max_model_len == config.engine.max_model_len
    assert config.teachers["code"].checkpoint == Path("code").absolute(), "as each path"
    assert [name for name, _ in config.gpus_of_teachers] == ["math", "math", "code"]
    assert config.teacher_settings("math").engine == config.teachers["math"].engine
    assert not config.teacher_settings("math").captures_routing


def test_teachers_are_on_gpus_if_the_replicas_of_the_run_are():
    config = load_config([TEACHER, "cluster.gpus_per_rank=1", "teachers.math.engine.tensor_parallel=2"])
    assert config.teachers["math"].engine.device == "cuda" and config.gpus_of_teachers == [("math", 2.0)]


def test_a_recorded_config_with_teachers_is_read_back():
    config = load_config([TEACHER, "distillation.kl=forward", "distillation.top_k=8"])
    assert build_config(plain_values(config)) == config
    assert asdict(config)["teachers"]["math"]["max_waiting"] == 256


def test_keys_of_teachers_have_the_name_that_the_user_chooses():
    keys = set(all_keys(RunConfig))
    assert {"teachers", "teachers.NAME.checkpoint", "teachers.NAME.engine.replicas", "distillation.kl"} <= keys


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["distillation.kl=forward"], "distillation"),
        (["teachers.math.tries=2"], "teachers.math.checkpoint"),
        ([TEACHER, "teachers.math.trys=2"], "teachers.math.trys"),
        ([TEACHER, "teachers.math.engine.replica=2"], "teachers.math.engine.replicas"),
        ([TEACHER, "teachers.math.engine.replicas=0"], "replicas"),
        ([TEACHER, "teachers.math.max_waiting=0"], "max_waiting"),
        ([TEACHER, "rollout.sampling.temperature=0.7"], "rollout.sampling"),
        ([TEACHER, "rollout.sampling.top_p=0.9"], "rollout.sampling"),
        ([TEACHER, "rollout.sampling.top_k=20"], "rollout.sampling"),
        ([TEACHER, "distillation.top_k=8"], "distillation.top_k"),
        ([TEACHER, "distillation.coefficient=0"], "coefficient"),
        ([TEACHER, "loss.count=informative"], "loss.count"),
        ([TEACHER, "distillation.rewards=false", "rollout.drop_without_spread=2"], "distillation.rewards"),
        ([TEACHER, "distillation.rewards=false", "loss.kl_in=reward", "loss.kl_coefficient=0.1"], "loss.kl_in"),
        ([TEACHER, "teachers.math.engine.max_model_len=200"], "teachers.math.engine.max_model_len"),
        ([TEACHER, "teachers.math.engine.speculation.method=ngram"], "engine.speculation"),
        ([TEACHER, "teachers.math.engine.nodes=2", "teachers.math.engine.tensor_parallel=2"], "engine.nodes"),
        ([TEACHER, "rollout.trajectories_per_group=1"], "rollout.trajectories_per_group"),
    ],
)
def test_what_a_teacher_cannot_do_is_refused(overrides, field):
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        load_config(overrides)


def test_alone_a_teacher_trains_groups_of_one():
    config = load_config([TEACHER, "distillation.rewards=false", "rollout.trajectories_per_group=1"])
    assert config.rollout.trajectories_per_group == 1


def test_a_teacher_has_room_for_the_longest_rollout_and_one_token():
    whole = [TEACHER, "engine.max_model_len=512", "rollout.limits.max_tokens=${engine.max_model_len}"]
    assert load_config(whole).teachers["math"].engine.max_model_len == 513
    assert load_config([*whole, "teachers.math.engine.max_model_len=600"]).teachers["math"].engine.max_model_len == 600
