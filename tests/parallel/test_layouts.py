"""Two ranks in every parallel layout give the result of one: every family, every kind of objective, balance loss.

Compared are logprobs, metrics, gradients, and the weights after two updates with a restart between them. No rank reads
or gathers more than it needs.
"""

import functools
from dataclasses import replace
from functools import partial

import pytest
import torch

from async_rl.controller.summary import parameters_of, rank_parts
from async_rl.trainer.loss.losses import GSPO, M2PO, DecoupledPPO, SequenceMask, SequenceTIS
from async_rl.trainer.model import families
from async_rl.trainer.model.families.shape import shape_of
from async_rl.trainer.model.layout import layout_problems
from async_rl.trainer.model.model import ParallelConfig
from tests.helpers import numerics, tiny_models
from tests.helpers.lanes import chosen_cases
from tests.parallel.parity import make_checkpoint
from tests.parallel.parity_cells import FAMILIES, LATENT
from tests.parallel.ranks import ADAM, BALANCE, assert_equal_cases, run_balance_case, run_case, run_on_ranks
from tests.parallel.support import (
    MARKS,
    TRAINER,
    assert_equal_gradients,
    expected_step,
    load_reference,
    make_batch,
    make_supervised_batch,
    reference_step,
    start_trainer,
    supervised_terms,
)

pytestmark = MARKS

MODELS = {
    **{family: partial(tiny_models.tiny_config, family) for family in tiny_models.FAMILIES},
    **FAMILIES,
    "qwen3_next": lambda: tiny_models.qwen3_next_config(
        num_hidden_layers=3,
        full_attention_interval=3,
        num_key_value_heads=1,  # two ranks share it
        linear_num_key_heads=4,
        linear_num_value_heads=8,
    ),
    "one_key_value_head": lambda: tiny_models.qwen2_moe_config(num_key_value_heads=1),  # two ranks share it
    "tied": lambda: tiny_models.qwen3_dense_config(tie_word_embeddings=True),
    # Numbers of layers that the stages do not divide: (2, 1); (3, 2) and (1, 1, 2, 1).
    "qwen3_moe_of_3": lambda: tiny_models.qwen3_moe_config(rope_theta=1000.0, num_hidden_layers=3),
    "deepseek_v3_of_5": lambda: tiny_models.deepseek_v3_config(
        **LATENT, num_hidden_layers=5, first_k_dense_replace=2, tie_word_embeddings=True
    ),
}
LAYOUTS = {
    "data": {},
    "data-distributed-optimizer": {"distributed_optimizer": True},
    "data-unpacked": {"packing": False},
    "data-recompute": {"recompute": "full"},
    "tensor": {"parallel": ParallelConfig(tensor=2)},
    "tensor-selective": {"parallel": ParallelConfig(tensor=2), "recompute": "selective"},
    "tensor-recompute": {"parallel": ParallelConfig(tensor=2), "recompute": "full"},
    "tensor-expert": {"parallel": ParallelConfig(tensor=2, expert=2, expert_tensor=1)},
    "expert": {"parallel": ParallelConfig(expert=2)},
    "expert-tensor": {"parallel": ParallelConfig(expert_tensor=2)},
    "pipeline": {"parallel": ParallelConfig(pipeline=2)},
    "pipeline-recompute": {"parallel": ParallelConfig(pipeline=2), "recompute": "full"},
    "virtual-pipeline": {"parallel": ParallelConfig(pipeline=2, virtual_pipeline=2), "recompute": "full"},
    "context": {"parallel": ParallelConfig(context=2)},
}
FAMILY_LAYOUTS = {
    "qwen3_moe": [name for name in LAYOUTS if name != "tensor-selective"],
    "deepseek_v3": [
        *("tensor", "tensor-selective", "expert", "pipeline", "virtual-pipeline", "tensor-expert", "context")
    ],
    "glm4_moe": ["tensor", "virtual-pipeline"],
    "qwen3_next": ["tensor-selective", "context", "pipeline"],
    "gpt_oss": ["tensor", "tensor-expert", "expert-tensor", "context"],
    "one_key_value_head": ["tensor", "tensor-expert"],
    "tied": ["tensor", "pipeline"],
    "qwen3_moe_of_3": ["pipeline", "pipeline-recompute"],
    "deepseek_v3_of_5": ["pipeline", "virtual-pipeline"],
}


@functools.cache
def shape(name):
    config = MODELS[name]()
    return shape_of(config.to_dict(), families.FAMILIES[config.model_type])


def suitable_layouts(family):
    """Of a family that FAMILY_LAYOUTS does not have: pipeline stages, and the layout that splits most."""
    config = replace(TRAINER, ranks=2, router_replay="none")
    split = [
        name
        for name in ("tensor-expert", "tensor", "expert")
        if not list(layout_problems(shape(family), replace(config, **LAYOUTS[name])))
    ]
    return [*split[:1], "pipeline"]


FAMILY_LAYOUTS |= {family: suitable_layouts(family) for family in tiny_models.FAMILIES if family not in FAMILY_LAYOUTS}
OBJECTIVES = {
    # The geometric means of their ratios are from 0.006 to 0.07.
    "gspo": GSPO(clip_low=0.2, clip_high=0.28, behaviour_weight_cap=0.02),
    # The products of their ratios are from 1e-41 to 1e-6.
    "sequence-tis": SequenceTIS(aggregation="group_mean", behaviour_weight_cap=1e-7),
    "sequence-mask": SequenceMask(aggregation="token_mean", max_sequence_drift=0.1),
    "m2po": M2PO(max_second_moment=1.0),
    "kl-in-reward": DecoupledPPO(kl_coefficient=0.1, kl_in="reward", behaviour_weight_cap=0.2),
}
OBJECTIVE_CASES = [
    *(("context", name, {}) for name in ("gspo", "sequence-tis", "m2po")),
    ("context", "sequence-mask", {"packing": False}),
    ("tensor", "gspo", {}),
    ("tensor", "gspo", {"fp32_lm_head": True}),
    *(("data", name, {}) for name in ("sequence-mask", "m2po")),
    ("pipeline", "m2po", {}),
    ("virtual-pipeline", "gspo", {"recompute": "none"}),
    *((layout, "kl-in-reward", {}) for layout in ("data", "tensor", "pipeline", "context")),
]
CASES = {f"{family}-{name}": (family, LAYOUTS[name]) for family, names in FAMILY_LAYOUTS.items() for name in names}
CASES |= {
    "-".join([layout, objective, *more]): ("qwen3_moe", {**LAYOUTS[layout], "loss": OBJECTIVES[objective], **more})
    for layout, objective, more in OBJECTIVE_CASES
}
BALANCE_CASES = {
    f"balance-{name}": ("qwen3_moe", {**LAYOUTS[name], **BALANCE})
    for name in ("tensor", "tensor-recompute", "pipeline", "context")
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    saved = {
        name: tiny_models.save_checkpoint(config(), folder / name, seed=3, vectors=name != "qwen3_moe")
        for name, config in MODELS.items()
    }
    # Its wide experts would move the gradients of a second update by 1e-5 for a rounding of the first.
    return saved | {"gpt_oss": make_checkpoint("gpt_oss", folder / "gpt_oss_narrow")}


def rows_of(name):
    layers = sum(shape(name).megatron.get("moe_layer_freq", []))
    return {"routed": layers > 0, "layers": layers}


def without_replay(checkpoint, batch):
    """dtype -> logprobs [S, T] of the start weights with their own routing: the reference of the KL."""
    trainer = start_trainer(checkpoint, router_replay="none")
    found = trainer.logprobs(batch)
    trainer.close()
    exact = reference_step(load_reference(checkpoint), batch, supervised_terms, routed=False).logprobs
    return {torch.float32: found, torch.float64: exact}


@pytest.fixture(scope="module")
def alone(checkpoints):
    """(family, loss) -> the result of one rank, and the first update by transformers."""

    @functools.cache
    def made(family, loss):
        batch, routed = make_batch(**rows_of(family)), rows_of(family)["routed"]
        trainer = start_trainer(
            checkpoints[family], optimizer=ADAM, loss=loss, router_replay="R3" if routed else "none"
        )
        result = run_case(trainer, batch)
        trainer.close()
        reference = without_replay(checkpoints[family], batch) if loss.penalises_rewards else {}
        return result, expected_step(checkpoints[family], batch, loss, routed=routed, reference=reference.get)

    return made


@pytest.fixture(scope="module")
def results(request, checkpoints, tmp_path_factory):
    layouts = [f"qwen3_moe-{layout}" for layout in chosen_cases(request, "layout")]
    chosen = {*chosen_cases(request, "name"), *layouts}
    cases = {
        name: {
            "checkpoint": checkpoints[family],
            "batch": rows_of(family),
            "router_replay": "R3" if rows_of(family)["routed"] else "none",
            **settings,
        }
        for name, (family, settings) in (CASES | BALANCE_CASES).items()
        if name in chosen
    }
    return run_on_ranks(cases, tmp_path_factory.mktemp("ranks"), ranks=2)


@pytest.mark.drawn(10)
@pytest.mark.parametrize("name", CASES)
def test_a_layout_gives_the_result_of_one_rank(name, results, alone):
    family, settings = CASES[name]
    expected, reference = alone(family, settings.get("loss", DecoupledPPO()))
    assert_equal_cases(results(name), expected, reference)
    if "loss" in settings:
        shares = [value for key, value in expected["metrics"][0].items() if key.endswith("/fraction")]
        assert any(0 < share < 1 for share in shares), "a filter touches some tokens and not all"


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", [name for name, (family, _) in CASES.items() if family != "qwen3_moe"])
def test_a_rank_reads_its_own_weights_and_exports_bucket_by_bucket(name, results):
    ours = results(name)
    more = 0
    if "one_key_value_head" in name:
        # Each of the ranks that share a head reads all its rows: a head of 32 with 4 query heads, in 4 layers, with
        # biases.
        more = 4 * (4 + 2) * 32 // 2 * (128 + 1)
    elif name.startswith("qwen3_next-tensor"):
        # Convolutions, in 2 layers with 320 channels and 4 taps, and in one layer the rows of a head with 4 query heads
        # and their gates.
        more = 2 * 320 // 2 * 4 + (2 * 4 + 2) * 32 // 2 * 128
    elif name.startswith("qwen3_5") and "tensor" in name:
        # Rows of 3 layers whose heads stand together only when they are joined: 4 taps of 160 channels, and input
        # projections to these channels, 96 gates, beta and decay of 4 heads.
        more = 3 * (160 * 4 + (160 + 96 + 2 * 4) * 128) // 2
    assert ours["read"] == ours["held"] + more
    assert ours["held"] < ours["whole"] or name.endswith("-context")  # context splits no weights
    assert ours["most_at_once"] <= ours["limit"]
    assert ours["limit"] < ours["whole"] / 2 or name.startswith("gpt_oss")  # one bucket has all experts of a layer


@pytest.mark.parametrize("layout", ["data", "data-distributed-optimizer", "tensor", "tensor-expert", "expert"])
def test_rank_parts_are_the_memory_that_a_rank_holds(layout, results, checkpoints):
    dense, experts = parameters_of(checkpoints["qwen3_moe"])
    config = replace(TRAINER, ranks=2, **LAYOUTS[layout])
    expected = sum(rank_parts(config, cpu_offload=0.0, dense=dense, experts=experts, layers=4).values())
    held = results(f"qwen3_moe-{layout}")["bytes"]
    assert held == pytest.approx(expected, rel=0.05)  # norms and routers are on each rank, and buffers are padded


@pytest.mark.parametrize("layout", ["data", "data-distributed-optimizer", "data-recompute", "context", "tensor"])
def test_gradients_are_summed_during_the_backward_pass_if_ranks_share_weights(layout, results):
    assert results(f"qwen3_moe-{layout}")["overlaps"] == (layout != "tensor")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", BALANCE_CASES)
def test_the_balance_loss_weighs_the_same_in_every_layout(name, results, checkpoints):
    checkpoint = checkpoints["qwen3_moe"]
    reference = reference_step(load_reference(checkpoint), make_batch(), supervised_terms, routed=False)
    got = results(name)
    trainer = start_trainer(checkpoint, optimizer=ADAM, **BALANCE)
    expected = run_balance_case(trainer, make_supervised_batch())
    trainer.close()
    assert got["metrics"].keys() == expected["metrics"].keys()
    assert got["metrics"]["tokens"] == expected["metrics"]["tokens"]
    numerics.assert_within(abs(got["metrics"]["loss"] - expected["metrics"]["loss"]), 2 * reference.loss_bound)
    assert_equal_gradients(got["gradients"], reference, expected["gradients"])
