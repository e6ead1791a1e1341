"""Learning-rate schedule and checks of the trainer's settings."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from async_rl.trainer.model.model import ParallelConfig, TrainerConfig
from async_rl.trainer.state.optimizer import OptimizerConfig


def test_the_rate_rises_over_the_warm_up_then_falls_to_its_minimum():
    config = OptimizerConfig(lr=0.5, min_lr=0.05, warmup_steps=4, decay="linear", decay_steps=9)
    rates = [config.lr_at(i) for i in range(16)]
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5]
    assert rates[4:14] == pytest.approx([0.5 - 0.05 * i for i in range(10)])
    assert rates[14:] == pytest.approx([0.05, 0.05])
    cosine = OptimizerConfig(lr=0.5, min_lr=0.1, decay="cosine", decay_steps=10)
    assert [cosine.lr_at(i) for i in (0, 5, 10)] == pytest.approx([0.5, 0.3, 0.1])


@given(st.integers(0, 200), st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.integers(1, 100))
@example(11, "constant", 12, 1)  # 0.003 * 12 / 12 is more than 0.003
def test_the_rate_stays_between_its_bounds(update, decay, warmup, steps):
    config = OptimizerConfig(lr=3e-3, min_lr=1e-4, warmup_steps=warmup, decay=decay, decay_steps=steps)
    rate = config.lr_at(update)
    assert 0 < rate <= 3e-3
    assert rate >= 1e-4 or update < warmup


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        (OptimizerConfig, {"lr": 0.0}, "optimizer.lr"),
        (OptimizerConfig, {"lr": 1e-3, "min_lr": 1.0}, "optimizer.min_lr"),
        (OptimizerConfig, {"betas": (0.9, 1.0)}, "optimizer.betas"),
        (OptimizerConfig, {"clip_grad": -1.0}, "optimizer.clip_grad"),
        (OptimizerConfig, {"warmup_steps": -1}, "optimizer.warmup_steps"),
        (OptimizerConfig, {"cpu_offload": 1.5}, "optimizer.cpu_offload"),
        (OptimizerConfig, {"decay": "step"}, "optimizer.decay"),
        (OptimizerConfig, {"decay": "linear"}, "decay_steps"),
        (TrainerConfig, {"ranks": 0}, "trainer.ranks"),
        (TrainerConfig, {"micro_batch_tokens": 0}, "trainer.micro_batch_tokens"),
        (TrainerConfig, {"dtype": "float16"}, "trainer.dtype"),
        (TrainerConfig, {"recompute": "some"}, "trainer.recompute"),
        (TrainerConfig, {"router_replay": "R4"}, "trainer.router_replay"),
        (TrainerConfig, {"timeout_s": 0}, "trainer.timeout_s"),
        (TrainerConfig, {"aux_loss_coefficient": -1.0}, "trainer.aux_loss_coefficient"),
        (TrainerConfig, {"ranks": 3, "parallel": ParallelConfig(tensor=2)}, "trainer.ranks"),
        (TrainerConfig, {"ranks": 2, "parallel": ParallelConfig(expert=4)}, "expert_tensor"),
        (ParallelConfig, {"virtual_pipeline": 2}, "virtual_pipeline"),
    ],
)
def test_a_bad_value_of_the_trainer_is_refused_by_field(kind, changes, field):
    with pytest.raises(ValueError, match=re.escape(field)):
        kind(**changes)


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual_pipeline", "expected"),
    [
        (4, 2, 1, (2, 2)),
        (3, 2, 1, (2, 1)),
        (5, 2, 2, (1, 1, 2, 1)),
        (61, 4, 1, (15, 15, 16, 15)),  # DeepSeek-V3
        (61, 8, 1, (7, 7, 8, 8, 8, 8, 8, 7)),
        (61, 4, 2, (7, 7, 8, 8, 8, 8, 8, 7)),
        (61, 16, 1, (3, 3, *[4] * 13, 3)),
        (92, 8, 1, (11, 11, 11, 12, 12, 12, 12, 11)),  # GLM-4.5
        (92, 4, 2, (11, 11, 11, 12, 12, 12, 12, 11)),
        (94, 4, 1, (23, 24, 24, 23)),  # Qwen3-235B-A22B
        (94, 4, 2, (11, *[12] * 6, 11)),
    ],
)
def test_layers_are_spread_with_fewer_on_the_first_and_last_stage(layers, pipeline, virtual_pipeline, expected):
    parallel = ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual_pipeline)
    assert parallel.layers_per_stage(layers) == expected


@given(pipeline=st.integers(2, 32), virtual_pipeline=st.integers(1, 4), more=st.integers(0, 200))
def test_stages_and_ranks_differ_by_one_layer_at_most(pipeline, virtual_pipeline, more):
    parallel = ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual_pipeline)
    layers = parallel.stages + more
    per_stage = parallel.layers_per_stage(layers)
    assert len(per_stage) == parallel.stages and sum(per_stage) == layers
    assert min(per_stage) >= 1 and max(per_stage) - min(per_stage) <= 1
    assert per_stage[-1] == min(per_stage) and per_stage[0] <= min(per_stage[:-1])
    most = parallel.most_layers_per_rank(layers)
    assert layers / pipeline <= most < layers / pipeline + 1


def test_ranks_that_the_model_does_not_use_are_data_parallel():
    config = TrainerConfig(ranks=16, parallel=ParallelConfig(tensor=2, pipeline=2, context=2))
    assert config.data_parallel == 2
    assert config.parallel.expert_tensor_size == 2
