"""LoRA on two ranks in every layout gives the result of one rank, from a state that one rank saved."""

import sys
import traceback
import warnings
from dataclasses import replace

import pytest
import torch

from async_rl.trainer.distributed import open_store
from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.model import ParallelConfig
from tests.helpers import tiny_models
from tests.helpers.lanes import chosen_cases
from tests.parallel.lora import LORA, adapter_gradients, adapters_of, add_adapters, start_lora_trainer
from tests.parallel.parity_cells import LATENT
from tests.parallel.processes import result_of, run_ranks
from tests.parallel.ranks import ADAM, LIMIT_S
from tests.parallel.resharding import whole_tensors
from tests.parallel.support import (
    MARKS,
    assert_equal_gradients,
    assert_equal_metrics,
    assert_equal_weights,
    assert_near,
    exported,
    load_reference,
    make_batch,
    policy_terms,
    reference_step,
    start_trainer,
)

pytestmark = MARKS

MODELS = {
    "qwen3_moe": lambda: tiny_models.qwen3_moe_config(rope_theta=1000.0),
    "deepseek_v3": lambda: tiny_models.deepseek_v3_config(**LATENT, num_hidden_layers=4),
    "qwen3": lambda: tiny_models.qwen3_dense_config(tie_word_embeddings=True),
}
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
    result["gradients"] = adapter_gradients(trainer)
    result["metrics"].append(trainer.train(batch))
    return {**result, "adapters": adapters_of(trainer), "weights": exported(trainer)}


def settings_of(family, settings):
    return {"optimizer": ADAM, "lora": LORA, "router_replay": "R3" if LAYERS[family] else "none", **settings}


def _rank(rank, names, checkpoints, addresses, folder):
    warnings.simplefilter("ignore")
    for name, address in zip(names, addresses, strict=True):
        family, settings = CASES[name]
        try:
            trainer = start_trainer(
                checkpoints[family], rank=rank, rendezvous=address, ranks=2, **settings_of(family, settings)
            )
            result = run_case(trainer, family, folder / f"{family}-state", folder / f"{name}-state")
            trainer.close()
            if rank == 0:
                torch.save(result, folder / f"{name}.pt")
        except BaseException:  # noqa: BLE001 - the test shows it
            (folder / f"{name}.{rank}.error").write_text(traceback.format_exc())
            sys.exit(1)  # the other rank waits in a collective and fails when this one is gone


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
        names = add_adapters(reference, adapters_of(trainer), scale=LORA.alpha / LORA.rank)
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
    stores = [open_store("127.0.0.1") for _ in names]
    addresses = [f"{store.host}:{store.port}" for store in stores]
    checkpoints = {family: checkpoint for family, (checkpoint, _, _) in alone.items()}
    run_ranks(_rank, (names, checkpoints, addresses, folder), ranks=2, limit_s=LIMIT_S)
    return {name: result_of(folder, name) for name in names}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", CASES)
def test_a_layout_gives_the_adapters_of_one_rank(name, results, alone):
    ours = results[name]
    assert isinstance(ours, dict), ours
    _, theirs, expected = alone[CASES[name][0]]
    assert_near(ours["logprobs"], theirs["logprobs"], bound=2 * expected.logprob_bound)
    for mine, single in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert_equal_metrics(mine, single, expected)
    assert_equal_gradients(ours["gradients"], expected, theirs["gradients"])  # both clipped
    assert_equal_weights(ours["adapters"], theirs["adapters"], expected, optimizer=ADAM, updates=2)
    assert ours["weights"].keys() == theirs["weights"].keys()


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", CASES)
def test_the_state_of_the_adapters_passes_through_a_layout_bit_for_bit(name, results, folder):
    assert isinstance(results[name], dict), results[name]
    before, after = whole_tensors(folder / f"{CASES[name][0]}-state"), whole_tensors(folder / f"{name}-state")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
