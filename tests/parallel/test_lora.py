"""LoRA on two ranks in every layout gives the result of one rank, from a state that one rank saved."""

import warnings
from dataclasses import replace

import pytest
import torch

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.model import ParallelConfig
from tests.helpers import tiny_models
from tests.helpers.lanes import chosen_cases
from tests.parallel.lora import LORA, add_adapters, start_lora_trainer
from tests.parallel.parity_cells import FAMILIES
from tests.parallel.processes import result_of, run_ranks, told
from tests.parallel.ranks import ADAM, assert_equal_cases
from tests.parallel.resharding import whole_tensors
from tests.parallel.support import (
    MARKS,
    assert_same,
    exported,
    gradients,
    load_reference,
    make_batch,
    policy_terms,
    reference_step,
    start_trainer,
)

pytestmark = MARKS

MODELS = {**FAMILIES, "qwen3": lambda: tiny_models.qwen3_dense_config(tie_word_embeddings=True)}
LAYERS = {"qwen3_moe": 3, "deepseek_v3": 3, "qwen3": 0}
LAYOUTS = {
    "data-distributed-optimizer": {"distributed_optimizer": True},
    "tensor": {"parallel": ParallelConfig(tensor=2)},
    "tensor-recompute": {"parallel": ParallelConfig(tensor=2), "recompute": "full"},
    "tensor-expert": {"parallel": ParallelConfig(tensor=2, expert=2, expert_tensor=1)},
    "expert": {"parallel": ParallelConfig(expert=2)},
    "expert-tensor": {"parallel": ParallelConfig(expert_tensor=2), "distributed_optimizer": True},
    "pipeline": {"parallel": ParallelConfig(pipeline=2), "recompute": "full"},
    "virtual-pipeline": {"parallel": ParallelConfig(pipeline=2, virtual_pipeline=2)},
    "context": {"parallel": ParallelConfig(context=2)},
}
FAMILY_LAYOUTS = {
    "qwen3_moe": list(LAYOUTS),
    "deepseek_v3": ["tensor", "tensor-expert", "virtual-pipeline"],
    "qwen3": ["tensor", "pipeline"],
}
CASES = {f"{family}-{name}": (family, LAYOUTS[name]) for family, names in FAMILY_LAYOUTS.items() for name in names}


def batch_of(family, **changes):
    return make_batch(routed=LAYERS[family] > 0, layers=LAYERS[family], **changes)


def run_case(trainer, family, state, again):
    """Restore the state of one rank, save it, and make two updates."""
    trainer.restore(state)
    trainer.save(again).result()
    batch = batch_of(family)
    result = {"logprobs": trainer.logprobs(batch), "metrics": [trainer.train(batch)]}
    result["gradients"] = gradients(trainer, adapters=True)
    result["metrics"].append(trainer.train(batch))
    return {**result, "weights": exported(trainer, adapters=True), "merged": sorted(exported(trainer))}


def settings_of(family, settings):
    return {"optimizer": ADAM, "lora": LORA, "router_replay": "R3" if LAYERS[family] else "none", **settings}


def _rank(rank, addresses, checkpoints, folder):
    warnings.simplefilter("ignore")
    for name, address in addresses.items():
        family, settings = CASES[name]
        with told(folder, name, rank=rank):
            trainer = start_trainer(
                checkpoints[family], rank=rank, rendezvous=address, ranks=2, **settings_of(family, settings)
            )
            result = run_case(trainer, family, folder / f"{family}-state", folder / f"{name}-state")
            trainer.close()
            if rank == 0:
                torch.save(result, folder / f"{name}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora-layouts")


@pytest.fixture(scope="module")
def alone(folder):
    """Family -> its checkpoint, the result of one rank, and the first update by transformers."""
    found = {}
    for family, config in MODELS.items():
        checkpoint = tiny_models.save_checkpoint(config(), folder / family, seed=3, vectors=family != "qwen3_moe")
        trainer = start_lora_trainer(checkpoint, **settings_of(family, {}))
        reference = load_reference(checkpoint)
        names = add_adapters(reference, exported(trainer, adapters=True), scale=LORA.alpha / LORA.rank)
        trainer.save(folder / f"{family}-state").result()
        result = run_case(trainer, family, folder / f"{family}-state", folder / f"{family}-again")
        trainer.close()
        step = reference_step(reference, batch_of(family), policy_terms(DecoupledPPO()), routed=LAYERS[family] > 0)
        step = replace(step, gradients={names[name]: gradient for name, gradient in step.gradients.items()})
        found[family] = checkpoint, result, step
    return found


@pytest.fixture(scope="module")
def results(request, alone, folder):
    names = chosen_cases(request, "name")
    checkpoints = {family: checkpoint for family, (checkpoint, _, _) in alone.items()}
    run_ranks(_rank, checkpoints, folder, meetings=names, ranks=2)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", CASES)
def test_a_layout_gives_the_adapters_of_one_rank_and_keeps_their_state(name, results, alone, folder):
    ours = result_of(folder, name)
    _, theirs, expected = alone[CASES[name][0]]
    assert_equal_cases(ours, theirs, expected)
    assert ours["merged"] == theirs["merged"]
    assert_same(whole_tensors(folder / f"{name}-state"), whole_tensors(folder / f"{CASES[name][0]}-state"))
