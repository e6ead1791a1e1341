"""Old logprobs are those under the weights that sampled each token, and verify what replicas have served."""

import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from async_rl.trainer.loss.losses import M2PO, DecoupledPPO, PPOClip
from async_rl.trainer.mismatch import MismatchError
from async_rl.trainer.model.model import LoraConfig, ParallelConfig
from async_rl.trainer.old_policy.old_policy import OldPolicyConfig
from async_rl.trainer.state.optimizer import OptimizerConfig
from message_queue.sampling_support import SamplingSupport
from tests.helpers import tiny_models
from tests.helpers.tiny_models import save_checkpoint
from tests.helpers.versions import mixed_batch, routed_by, sampled_by
from tests.parallel.parity import make_checkpoint
from tests.parallel.processes import result_of, run_ranks, told
from tests.parallel.support import MARKS, VOCAB, gradients, start_trainer

pytestmark = MARKS
ADAM = OptimizerConfig(lr=1e-3, eps=1e-3)
AT_ONE = 1e-12  # largest k3 under the same weights in float32
SPANS = [[(0, 6), (1, 3), (3, 4)], [(3, 7)], [(2, 5), (3, 2)], [(1, 9)], [(0, 4), (2, 4)], [(3, 3)]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model") / "qwen3_moe")


@pytest.fixture
def old_trainer(checkpoint):
    """Starts trainers with old logprobs, and closes them."""
    started = []

    def start(*, max_staleness=20, bound=1e-7, model=checkpoint, **settings):
        old = OldPolicyConfig(max_staleness=max_staleness, bound=lambda _noise: bound)
        settings = {"optimizer": ADAM, "micro_batch_tokens": 60, **settings}
        started.append(start_trainer(model, old_policy=old, **settings))
        return started[-1]

    yield start
    for trainer in started:
        trainer.close()


def trained_to(trainer, batch, *, update, **settings):
    """Train other batches up to `update` updates; the batch with the logprobs of each of its versions."""
    for now in range(update):
        batch = sampled_by(trainer, batch, now)
        other = mixed_batch([[(now, 8)]] * 3, update=now, seed=100 + now, **settings)
        trainer.train(sampled_by(trainer, other, now))
    return sampled_by(trainer, batch, update)


@pytest.mark.parametrize("staleness", [0, 1, 4, 16])
def test_old_logprobs_are_those_of_the_version_at_every_staleness(old_trainer, staleness):
    trainer, now = old_trainer(), staleness + 2
    spans = [[(2, 6), (now, 3)], [(2, 7)], [(1, 4), (2, 5)], [(now, 3)], [(0, 2), (2, 3), (now, 2)]]
    metrics = trainer.train(trained_to(trainer, mixed_batch(spans, update=now), update=now))
    assert metrics["old/k3_largest"] <= AT_ONE and metrics["old/k3"] <= AT_ONE
    assert metrics["old/exact_fraction"] == 1 and metrics["old/missing_fraction"] == 0
    if staleness:
        assert metrics["old/movement_k3"] == pytest.approx(metrics["mismatch/k3"], rel=1e-3)
        assert metrics["mismatch/k3"] > 1e-6, "the weights moved"


CASES = {
    "live router": {"router_replay": "none"},
    "recorded router": {"router_replay": "R2"},
    "separate": {"prefix_sharing": "off"},
    "padded": {"packing": False},
    "small micro-batches": {"micro_batch_tokens": 20},
    "reference": {"loss": DecoupledPPO(kl_coefficient=0.1)},
    "recomputation": {"recompute": "full"},
    "adapters": {"lora": LoraConfig(rank=4), "optimizer": OptimizerConfig(lr=1e-2, eps=1e-3)},
}


@pytest.mark.parametrize("case", CASES)
def test_old_logprobs_are_exact_with_every_setting(old_trainer, case):
    trainer = old_trainer(**CASES[case])
    routing = {} if CASES[case].get("router_replay", "R3") == "R3" else {"routing": None}
    batch = trained_to(trainer, mixed_batch(SPANS, update=3, **routing), update=3, **routing)
    metrics = trainer.train(batch)
    assert metrics["old/k3"] <= AT_ONE
    assert metrics["old/movement_k3"] > 1e-7, "the weights moved"
    assert np.isnan(metrics["old/k3_largest"]) == bool(routing), "without the engine's rows nothing is verified"


def test_old_logprobs_of_a_dense_model_are_exact_after_a_resumed_prefix(old_trainer, tmp_path):
    model = save_checkpoint(tiny_models.qwen3_dense_config(), tmp_path / "dense", seed=3)
    trainer = old_trainer(model=model, router_replay="none")
    batch = trained_to(trainer, mixed_batch(SPANS, update=3, routing=None), update=3, routing=None)
    metrics = trainer.train(batch)
    assert metrics["old/k3_largest"] <= AT_ONE and metrics["old/exact_fraction"] == 1


def test_old_logprobs_are_over_the_tokens_that_the_sampler_kept(old_trainer):
    trainer, batch = old_trainer(), mixed_batch(SPANS, update=3)

    def cut(sequence):
        counts, sampled = (
            np.zeros(len(sequence), np.int64),
            np.concatenate([r.start + np.arange(r.tokens) for r in sequence.runs]),
        )
        counts[sampled] = 8
        ids = np.sort((sequence.token_ids[sampled, None] + np.arange(8) * 13) % VOCAB)
        return replace(sequence, support=SamplingSupport.pack(counts, ids.flatten()))

    batch = replace(batch, contents=[tuple(tuple(map(cut, each)) for each in group) for group in batch.contents])
    assert trainer.train(trained_to(trainer, batch, update=3))["old/k3_largest"] <= AT_ONE


def test_the_weights_of_the_walk_leave_no_trace(old_trainer, checkpoint):
    batch = mixed_batch(SPANS, update=3)
    trainer, other = old_trainer(), start_trainer(checkpoint, optimizer=ADAM, micro_batch_tokens=60)
    given = trained_to(trainer, batch, update=3)
    trained_to(other, batch, update=3)
    metrics, expected = trainer.train(given), other.train(given)
    other.close()
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    ours, theirs = gradients(trainer), gradients(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_each_mini_batch_has_its_old_logprobs(old_trainer):
    trainer = old_trainer(updates_per_batch=2)
    batch = mixed_batch(
        [[(0, 6), (2, 3)], [(2, 4)], [(0, 5)], [(2, 6)]], update=2, mini_batches={0: 0, 1: 1, 2: 1, 3: 0}
    )
    batch = sampled_by(trainer, batch, 0)
    trainer.train(sampled_by(trainer, mixed_batch([[(0, 8)]] * 2, update=0, mini_batches={0: 0, 1: 1}), 0))
    metrics = trainer.train(sampled_by(trainer, batch, 2))
    assert metrics["old/k3_largest"] <= AT_ONE and metrics["old/exact_fraction"] == 1
    assert metrics["old/k3_lag1"] <= AT_ONE, "tokens of the start weights in the second update"


def test_tokens_of_versions_that_are_not_stored_count_as_missing(old_trainer):
    trainer = old_trainer(max_staleness=1)
    metrics = trainer.train(trained_to(trainer, mixed_batch(SPANS, update=3), update=3))
    missing = sum(tokens for spans in SPANS for version, tokens in spans if version < 2)
    assert metrics["old/missing_fraction"] == pytest.approx(missing / sum(t for spans in SPANS for _, t in spans))
    assert metrics["old/k3_largest"] <= AT_ONE


def test_a_token_over_kept_keys_and_values_is_labelled_and_not_verified(old_trainer):
    trainer = old_trainer()
    batch = trained_to(trainer, mixed_batch(SPANS, update=3, admitted=3, retained_kv=True), update=3)
    wrong = sampled_by(trainer, batch, 1)  # as if old keys and values changed the logprobs
    metrics = trainer.train(replace(wrong, contents=batch.contents))
    assert metrics["old/exact_fraction"] < 1
    assert metrics["old/k3_largest"] <= AT_ONE and metrics["old/k3_inexact"] <= AT_ONE


def test_separated_ratios_have_the_gradient_of_combined_ones_without_engine_error(old_trainer):
    found = []
    for ratio in ("combined", "separated"):
        trainer = old_trainer(loss=PPOClip(ratio=ratio, clip_low=0.9, clip_high=9.0))
        trainer.train(trained_to(trainer, mixed_batch(SPANS, update=3), update=3))
        found.append(gradients(trainer))
    for name, expected in found[0].items():
        assert torch.allclose(found[1][name], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())), name


@pytest.mark.parametrize(("ratio", "masked"), [("combined", False), ("separated", True)])
def test_m2po_masks_the_movement_alone_with_separated_ratios(old_trainer, ratio, masked):
    trainer = old_trainer(loss=M2PO(ratio=ratio, max_second_moment=1e-6), bound=math.inf)
    batch = trained_to(trainer, mixed_batch(SPANS, update=3), update=3)
    current = [
        logprobs.numpy() for logprobs in trainer.logprobs(batch)
    ]  # as if the error of the engine hid the movement
    contents = [((replace(of[0][0], logprobs=own),),) for of, own in zip(batch.contents, current, strict=True)]
    metrics = trainer.train(replace(batch, contents=contents))
    assert (metrics["mask/fraction"] > 0) == masked


def test_the_versions_continue_from_a_checkpoint_as_without_a_restart(old_trainer, tmp_path):
    trainer, batch = old_trainer(), mixed_batch(SPANS, update=3)
    batch = trained_to(trainer, batch, update=3)
    trainer.save(tmp_path / "state").result()
    expected = trainer.train(batch)
    trainer.restore(tmp_path / "state")
    assert trainer.train(batch) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    other = old_trainer()
    other.restore(tmp_path / "state")
    assert other.train(batch) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_weights_of_the_same_update_that_engines_got_from_another_run_are_missing(old_trainer):
    trainer = old_trainer()
    batch = trained_to(trainer, mixed_batch(SPANS, update=3), update=3)
    trainer.forget_versions(3, 3)
    metrics = trainer.train(batch)
    newest = sum(tokens for spans in SPANS for version, tokens in spans if version == 3)
    assert metrics["old/missing_fraction"] == pytest.approx(newest / sum(t for spans in SPANS for _, t in spans))


# ---- planted faults: tokens of version 1 from a replica with other weights, trained three updates later

REPLICAS = [[((1, "replica-0"), 9)], [((1, "replica-1"), 7), ((4, "replica-0"), 2)], [((1, "replica-1"), 60)]]


def served(trainer, fault, *, routed=True):
    """The batch of REPLICAS at update 4; `fault` changes the model while replica-1 samples its tokens of version 1.

    routed: sequences of one version have the rows of the routers.
    """
    batch, before = mixed_batch(REPLICAS, update=4), {}
    for now in range(5):
        of_good = batch if now == 1 else sampled_by(trainer, batch, now)
        live = trainer._old.store._live
        kept = {name: tensor.detach().clone() for name, tensor in live.items()}
        if now == 1:
            of_good = routed_by(trainer, of_good, [0] if routed else [])
            of_good = sampled_by(trainer, of_good, now, where=lambda run: run.replica == "replica-0")
            with torch.no_grad():
                fault(live, before)
            of_good = routed_by(trainer, of_good, [2] if routed else [])
            of_good = sampled_by(trainer, of_good, now, where=lambda run: run.replica == "replica-1")
            with torch.no_grad():
                for name, tensor in live.items():
                    tensor.copy_(kept[name])
        before, batch = kept, of_good
        if now < 4:
            other = mixed_batch([[(now, 8)]] * 3, update=now, seed=100 + now)
            trainer.train(sampled_by(trainer, other, now))
    return batch


def version_before(live, before):
    for name, tensor in live.items():
        tensor.copy_(before[name])


def old_experts(live, before):
    for name, tensor in live.items():
        if ".experts." in name:
            tensor.copy_(before[name])


def old_attention_of_a_layer(live, before):
    for name, tensor in live.items():
        if ".layers.2.self_attention" in name:
            tensor.copy_(before[name])


def swapped_tensors(live, _before):
    for name in [name for name in live if ".layers.2.self_attention.linear" in name and live[name].ndim == 2]:
        other = live[name.replace(".layers.2.", ".layers.3.")]
        kept = other.clone()
        other.copy_(live[name])
        live[name].copy_(kept)


FAULTS = {
    version_before: "its tokens fit version 0",
    old_experts: r"fit version 1 with model.layers.\*.mlp.experts of version 0",
    old_attention_of_a_layer: "fit version 1 with model.layers.2.self_attn of version 0",
    swapped_tensors: "from layer 2 on.*router of model.layers.2 differs",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_other_weights_than_those_of_the_version_are_found_and_named(old_trainer, fault):
    trainer = old_trainer()
    batch = served(trainer, fault)
    weights = {name: tensor.detach().clone() for name, tensor in trainer._old.store._live.items()}
    with pytest.raises(MismatchError, match=f"replica-1 has served other weights than version 1.*{FAULTS[fault]}"):
        trainer.train(batch)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trainer._old.store._live.items())


def test_wrong_weights_of_the_current_version_are_found_before_the_step(old_trainer):
    trainer = old_trainer()
    batch = trained_to(trainer, mixed_batch([[((2, "replica-1"), 6)], [((2, "replica-0"), 4)]], update=2), update=2)
    with torch.no_grad():
        for name, tensor in trainer._old.store._live.items():
            if "output_layer" in name:
                tensor.mul_(1.5)
    weights = {name: tensor.detach().clone() for name, tensor in trainer._old.store._live.items()}
    with pytest.raises(MismatchError, match=r"replica-[01] has served other weights than version 2"):
        trainer.train(batch)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trainer._old.store._live.items())


# ---- layouts

LAYOUTS = {
    "data": {},
    "tensor": {"parallel": ParallelConfig(tensor=2)},
    "pipeline": {"parallel": ParallelConfig(pipeline=2)},
    "context": {"parallel": ParallelConfig(context=2)},
    "expert": {"parallel": ParallelConfig(expert=2)},
    "distributed-optimizer": {"distributed_optimizer": True},
}


def _rank(rank, addresses, checkpoint, folder):
    for name, changes in LAYOUTS.items():
        with told(folder, name, rank=rank):
            old = OldPolicyConfig(max_staleness=20, bound=lambda _noise: 1e-7)
            start = partial(start_trainer, checkpoint, optimizer=ADAM, rank=rank, rendezvous=addresses[name], ranks=2)
            first, second = (start(old_policy=old, **changes) for _ in range(2))
            metrics, message = first.train(trained_to(first, mixed_batch(SPANS, update=3), update=3)), ""
            try:
                second.train(served(second, old_experts, routed=False))
            except MismatchError as error:
                message = str(error)
            second.close()
            first.close()
            if rank == 0:
                torch.save((metrics, message), folder / f"{name}.pt")


@pytest.fixture(scope="module")
def of_layouts(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    run_ranks(_rank, checkpoint, folder, meetings=LAYOUTS, ranks=2)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_old_logprobs_are_exact_and_verified_on_two_ranks(of_layouts, layout):
    metrics, message = result_of(of_layouts, layout)
    assert metrics["old/k3_largest"] <= AT_ONE and metrics["old/exact_fraction"] == 1
    assert re.search(f"replica-1 has served other weights than version 1.*{FAULTS[old_experts]}", message)
