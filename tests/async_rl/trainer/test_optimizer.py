"""Learning-rate schedule and checks of the trainer's settings."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from async_rl.trainer.model.model import ParallelConfig, TrainerConfig
from async_rl.trainer.state.optimizer import OptimizerConfig


def test_the_rate_rises_over_the_warm_up_then_falls_to_the_minimum_and_stays():
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4, decay="linear", decay_steps=9)
    rates = [config.lr_at(i) for i in range(16)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:14] == pytest.approx([1.0 - 0.1 * i for i in range(10)])
    assert rates[14:] == pytest.approx([0.1, 0.1])


def test_cosine_is_halfway_in_the_middle():
    config = OptimizerConfig(lr=1.0, min_lr=0.2, decay="cosine", decay_steps=10)
    assert config.lr_at(0) == 1.0
    assert config.lr_at(5) == pytest.approx(0.6)
    assert config.lr_at(10) == pytest.approx(0.2)


@given(st.integers(0, 200), st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.integers(1, 100))
@example(11, "constant", 12, 1)  # 0.003 * 12 / 12 is more than 0.003
def test_the_rate_stays_between_its_bounds(update, decay, warmup, steps):
    config = OptimizerConfig(lr=3e-3, min_lr=1e-4, warmup_steps=warmup, decay=decay, decay_steps=steps)
    rate = config.lr_at(update)
    assert 0 < rate <= 3e-3
    assert rate >= 1e-4 or update < warmup


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, r"optimizer\.lr is 0.0"),
        ({"lr": 1e-3, "min_lr": 1.0}, r"optimizer\.min_lr is 1.0"),
        ({"betas": (0.9, 1.0)}, r"optimizer\.betas"),
        ({"clip_grad": -1.0}, r"optimizer\.clip_grad is -1.0"),
        ({"warmup_steps": -1}, r"optimizer\.warmup_steps is -1"),
        ({"cpu_offload": 1.5}, r"optimizer\.cpu_offload is 1.5"),
        ({"decay": "step"}, r"optimizer\.decay is 'step'"),
        ({"decay": "linear"}, r"decay is linear with decay_steps=0"),
    ],
)
def test_a_bad_optimizer_value_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, r"trainer\.ranks is 0"),
        ({"micro_batch_tokens": 0}, r"trainer\.micro_batch_tokens is 0"),
        ({"dtype": "float16"}, r"trainer\.dtype is 'float16'"),
        ({"recompute": "some"}, r"trainer\.recompute is 'some'"),
        ({"router_replay": "R4"}, r"trainer\.router_replay is 'R4'"),
        ({"timeout_s": 0}, r"trainer\.timeout_s is 0"),
        ({"aux_loss_coefficient": -1.0}, r"trainer\.aux_loss_coefficient is -1.0"),
        ({"ranks": 3, "parallel": ParallelConfig(tensor=2)}, r"trainer\.ranks is 3, not a multiple of tensor"),
        (
            {"ranks": 2, "parallel": ParallelConfig(expert=4)},
            r"not a multiple of expert x expert_tensor x pip",
        ),
    ],
)
def test_a_bad_trainer_value_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainerConfig(**changes)


def test_virtual_stages_need_a_pipeline():
    with pytest.raises(ValueError, match=r"virtual_pipeline is 2 with pipeline=1"):
        ParallelConfig(virtual_pipeline=2)


def test_what_the_model_does_not_use_is_data_parallel():
    config = TrainerConfig(ranks=16, parallel=ParallelConfig(tensor=2, pipeline=2, context=2))
    assert config.data_parallel == 2
    assert config.parallel.expert_tensor_size == 2
