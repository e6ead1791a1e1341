"""Model families on two ranks give what one rank gives; no rank reads or gathers more than it needs."""

import pytest

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.model import ParallelConfig
from tests.helpers import tiny_models
from tests.parallel.ranks import ADAM, assert_equal_cases, run_case, run_on_ranks
from tests.parallel.support import LENGTHS, load_reference, make_batch, policy_terms, reference_step, start_trainer

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

# An odd rank of the latents, so that splitting them over ranks would fail.
SMALL_LATENT = {
    "q_lora_rank": 47,
    "kv_lora_rank": 41,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}
MODELS = {
    "deepseek_v3": lambda: tiny_models.deepseek_v3_config(**SMALL_LATENT, num_hidden_layers=4),
    "glm4_moe": tiny_models.glm4_moe_config,
    "qwen2_moe": tiny_models.qwen2_moe_config,
    "mixtral": lambda: tiny_models.mixtral_config(num_hidden_layers=2),
    "tied": lambda: tiny_models.qwen3_dense_config(tie_word_embeddings=True),
}
ROUTED = {"deepseek_v3": 3, "glm4_moe": 3, "qwen2_moe": 3, "mixtral": 2, "tied": 0}  # layers
TENSOR = {"parallel": ParallelConfig(tensor=2)}
EXPERT = {"parallel": ParallelConfig(expert=2)}
PIPELINE = {"parallel": ParallelConfig(pipeline=2)}
VIRTUAL_PIPELINE = {"parallel": ParallelConfig(pipeline=2, virtual_pipeline=2), "recompute": "full"}
TENSOR_EXPERT = {"parallel": ParallelConfig(tensor=2, expert=2, expert_tensor=1)}
LAYOUTS = {
    ("deepseek_v3", "tensor"): TENSOR,
    ("deepseek_v3", "tensor-recompute"): {**TENSOR, "recompute": "selective"},
    ("deepseek_v3", "expert"): EXPERT,
    ("deepseek_v3", "pipeline"): PIPELINE,
    ("deepseek_v3", "virtual-pipeline"): VIRTUAL_PIPELINE,
    ("deepseek_v3", "tensor-expert"): TENSOR_EXPERT,
    ("deepseek_v3", "context"): {"parallel": ParallelConfig(context=2)},
    ("glm4_moe", "tensor"): TENSOR,
    ("glm4_moe", "virtual-pipeline"): VIRTUAL_PIPELINE,
    ("qwen2_moe", "tensor-expert"): TENSOR_EXPERT,
    ("qwen2_moe", "pipeline"): PIPELINE,
    ("mixtral", "tensor-expert"): TENSOR_EXPERT,
    ("tied", "tensor"): TENSOR,
    ("tied", "pipeline"): PIPELINE,
}
CASES = {"-".join(key): key for key in LAYOUTS}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("family-layouts")
    return {
        name: tiny_models.save_checkpoint(config(), folder / name, seed=3, vectors=True)
        for name, config in MODELS.items()
    }


def settings(family):
    return {} if ROUTED[family] else {"router_replay": "none"}


def batch_of(family):
    return {"routed": ROUTED[family] > 0, "layers": ROUTED[family]}


@pytest.fixture(scope="module")
def expected(checkpoints):
    results = {}
    for family, checkpoint in checkpoints.items():
        trainer = start_trainer(checkpoint, optimizer=ADAM, **settings(family))
        results[family] = run_case(trainer, make_batch(**batch_of(family)))
        trainer.close()
    return results


@pytest.fixture(scope="module")
def references(checkpoints):
    return {
        family: reference_step(
            load_reference(checkpoint),
            make_batch(**batch_of(family)),
            policy_terms(DecoupledPPO()),
            routed=ROUTED[family] > 0,
        )
        for family, checkpoint in checkpoints.items()
    }


@pytest.fixture(scope="module")
def results(checkpoints, tmp_path_factory):
    cases = {
        name: {
            "checkpoint": checkpoints[family],
            "batch": batch_of(family),
            **settings(family),
            **LAYOUTS[family, layout],
        }
        for name, (family, layout) in CASES.items()
    }
    return run_on_ranks(None, cases, tmp_path_factory.mktemp("family-ranks"), ranks=2)


def result_of(results, name):
    assert isinstance(results[name], dict), results[name]
    return results[name]


@pytest.mark.parametrize("name", CASES)
def test_a_layout_changes_nothing(name, results, expected, references):
    ours, theirs = result_of(results, name), expected[CASES[name][0]]
    assert_equal_cases(ours, theirs, references[CASES[name][0]])


@pytest.mark.parametrize("name", CASES)
def test_a_rank_reads_what_it_holds_and_export_goes_tensor_by_tensor(name, results):
    ours = result_of(results, name)
    assert ours["read"] == ours["held"]
    assert ours["held"] < ours["whole"] or CASES[name][1] == "context"  # which splits no weights
    # A tensor, its parts as they are gathered, the copy that is handed out; experts come as many as there are ranks.
    assert ours["most_at_once"] <= 8 * ours["largest"] < ours["whole"] / 2


def test_the_batch_has_sequences_of_many_lengths():
    assert len(set(LENGTHS)) > 4
