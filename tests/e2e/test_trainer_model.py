"""The Megatron model against transformers: weights, logits, and loss and gradients under forced routing."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from async_rl.trainer.batch.routed_experts import RoutingError
from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.weights.model_info import CheckpointError
from async_rl.weights.transport import read_update
from tests.helpers import numerics
from tests.helpers.losses import LOSSES
from tests.parallel.support import (
    LAYERS,
    assert_equal_steps,
    assert_near,
    gradients,
    largest_difference,
    load_reference,
    make_batch,
    per_expert,
    policy_terms,
    reference_step,
    save_tiny_moe,
    start_trainer,
    training_batch_of,
)

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

LOSS = DecoupledPPO(entropy_coefficient=0.01)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_moe(tmp_path_factory.mktemp("trainer") / "model")


@pytest.fixture(scope="module")
def trainer(checkpoint):
    """Owns the process group of this module's trainers."""
    trainer = start_trainer(checkpoint, loss=LOSS)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def reference(checkpoint):
    return load_reference(checkpoint)


@pytest.fixture(scope="module")
def expected(reference):
    """Loss and gradients of the reference on the default batch."""
    return reference_step(reference, make_batch(), policy_terms(LOSS))


def saved_weights(folder):
    with safe_open(next(folder.glob("*.safetensors")), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_weights_survive_the_way_through_megatron_bit_for_bit(trainer, checkpoint, tmp_path):
    update = trainer.export(tmp_path, version=4)
    exported = dict(read_update(update.path))
    saved = per_expert(saved_weights(checkpoint))
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert update.weights.version == 4


def test_an_export_removes_versions_that_are_needed_no_longer(trainer, tmp_path):
    folder = tmp_path / "versions"
    for version in (1, 2):
        trainer.export(folder, version=version)
    trainer.export(folder, version=3, keep_version=2)
    assert sorted(path.name for path in folder.iterdir()) == ["weights-2.safetensors", "weights-3.safetensors"]
    trainer.remove_updates(folder)
    assert list(tmp_path.iterdir()) == []
    trainer.remove_updates(folder)
    assert trainer.export(folder, version=4).path.is_file()


def test_fused_expert_tensors_are_read_like_single_ones(trainer, reference, checkpoint, tmp_path):
    folder = tmp_path / "fused"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    fused = {name: p.detach().contiguous() for name, p in reference.named_parameters()}
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    save_file(fused, folder / "model.safetensors")
    other = start_trainer(folder)
    ours, theirs = (dict(read_update(t.export(tmp_path, version=i).path)) for i, t in enumerate((trainer, other)))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_logprobs_equal_those_of_transformers(trainer, reference, checkpoint):
    batch = make_batch(routed=False)
    live = start_trainer(checkpoint, router_replay="none")
    expected = reference_step(reference, batch, policy_terms(LOSS), routed=False)
    got = live.logprobs(batch)
    mask = batch["loss_mask"]
    assert_near(got[mask], expected.logprobs[mask], bound=expected.logprob_bound)
    assert not got[~mask].any()


def test_logits_equal_those_of_transformers(trainer, reference, checkpoint):
    from async_rl.trainer.batch.micro_batch import Coordinates
    from async_rl.trainer.step import MicroBatchBuilder

    batch = make_batch((40,), routed=False)
    plan = trainer._planner.whole(training_batch_of(batch))
    builder = MicroBatchBuilder(
        plan.batch,
        plan.updates[0],
        at=Coordinates(),
        device=torch.device("cpu"),
        packing=True,
        replay="none",
        routing=None,
        layers=(),
        rotary=trainer.model.rotary,
    )
    with torch.no_grad():
        ours = builder.build([0]).forward(trainer.model.wrapped[0], at=Coordinates())
        single = reference(batch["token_ids"]).logits
        exact_model = numerics.float64_model(reference)
        with numerics.float64_forward():
            exact = exact_model(batch["token_ids"]).logits
    assert_near(ours, exact, bound=numerics.FACTOR * numerics.error(single, exact))


def test_replayed_routing_gives_loss_and_gradients_of_a_reference_forced_to_it(trainer, expected):
    metrics = trainer.train(make_batch())
    assert_equal_steps(metrics["loss"], gradients(trainer), expected)
    assert 0 < metrics["routing/overlap"] < 0.5  # random routing agrees by chance only
    assert metrics["routing/fallback_fraction"] == pytest.approx(6 / 103)  # the last token of each sequence


def test_dropping_replay_on_one_layer_is_seen(trainer, expected):
    hook = trainer.model.chunks[0].decoder.layers[LAYERS[1]].mlp.router
    held, hook.router_replay = hook.router_replay, None
    try:
        trainer.train(make_batch())
    finally:
        hook.router_replay = held
    assert largest_difference(gradients(trainer), expected.gradients) > 100 * expected.gradient_bound


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": False},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 4096},
        {"packing": False, "recompute": "full", "micro_batch_tokens": 40},
    ],
    ids=str,
)
def test_layout_of_the_work_changes_nothing(trainer, checkpoint, expected, changes):
    other = start_trainer(checkpoint, loss=LOSS, **changes)
    metrics = other.train(make_batch())
    assert_equal_steps(metrics["loss"], gradients(other), expected)


@pytest.mark.parametrize("name", ["ppo_clip", "decoupled_ppo"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_every_loss_equals_its_reference(trainer, checkpoint, reference, name, aggregation):
    loss = LOSSES[name](aggregation=aggregation)
    other = start_trainer(checkpoint, loss=loss)
    expected = reference_step(reference, make_batch(), policy_terms(loss))
    metrics = other.train(make_batch())
    assert_equal_steps(metrics["loss"], gradients(other), expected)


def test_two_models_in_a_process_do_not_share_routing(trainer, checkpoint, expected):
    other = start_trainer(checkpoint, loss=LOSS)
    other.logprobs(make_batch(seed=9))
    metrics = trainer.train(make_batch())
    assert_equal_steps(metrics["loss"], gradients(trainer), expected)


def test_a_row_of_minus_one_is_routed_by_the_live_router(trainer, checkpoint, reference):
    batch = make_batch()
    batch["routed_experts"][:, 3:8] = -1
    expected = reference_step(reference, batch, policy_terms(LOSS))
    metrics = trainer.train(batch)
    assert_equal_steps(metrics["loss"], gradients(trainer), expected)


def test_replaying_what_the_live_router_chose_agrees_with_it_fully(trainer, checkpoint, reference):
    batch = make_batch()
    batch["routed_experts"][:] = -1
    metrics = trainer.train(batch)
    assert metrics["routing/fallback_fraction"] == 1.0
    recorded = start_trainer(checkpoint, loss=LOSS, router_replay="R2")
    again = recorded.train(batch)
    assert again["routing/overlap"] == 1.0
    expected = reference_step(reference, batch, policy_terms(LOSS), routed=False)
    for loss in (metrics["loss"], again["loss"]):
        numerics.assert_within(abs(loss - expected.loss), expected.loss_bound)


def test_same_weights_and_routing_give_no_mismatch_at_lag_zero(trainer, expected):
    batch = make_batch()
    batch["behaviour_logprobs"] = trainer.logprobs(batch)
    metrics = trainer.train(batch)
    drift = 2 * expected.logprob_bound  # of logprobs that were computed twice
    numerics.assert_within(metrics["mismatch/abs_max"], drift)
    # k3 is exp(d) - 1 - d, which is d^2 / 2 + ..., computed from a float32 exp(d) or better.
    numerics.assert_within(metrics["mismatch/k3_lag0"], drift**2 + numerics.EPSILON)
    numerics.assert_within(abs(metrics["ess/token"] - 1), 4 * drift)  # weights are within exp(-drift) and exp(drift)


def fault_at(batch, value):
    batch["routed_experts"][2, 5, 1] = torch.tensor(value, dtype=torch.int16)
    return batch


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda b: fault_at(b, [3, 8]), "outside 0..7.*sequence 2, position 5, layer 2"),
        (lambda b: fault_at(b, [4, 4]), "duplicate expert: .4, 4. at sequence 2, position 5, layer 2"),
        (lambda b: b.set("routed_experts", b["routed_experts"][:, :, 1:]), r"MoE layers \[1, 2, 3\]"),
        (lambda b: b.exclude("routed_experts"), "sequence . has no routed_experts"),
    ],
    ids=["range", "duplicate", "too few layers", "absent"],
)
def test_routing_that_does_not_fit_is_refused(trainer, broken, message):
    batch = make_batch()
    with pytest.raises(RoutingError, match=message):
        trainer.train(broken(batch))


def test_a_checkpoint_with_layers_for_multi_token_prediction_is_refused(checkpoint, trainer, tmp_path):
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    further = {
        "model.layers.4.eh_proj.weight": torch.zeros(2, 2),
        "model.layers.4.shared_head.norm.weight": torch.zeros(2),
    }
    save_file(saved_weights(checkpoint) | further, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2 tensors of layers after num_hidden_layers=4.*layers\.4\.eh_proj"):
        start_trainer(folder)


def test_a_checkpoint_without_a_tensor_is_refused(trainer, checkpoint, tmp_path):
    folder = tmp_path / "short"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    weights = saved_weights(checkpoint)
    del weights["model.layers.2.self_attn.o_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor model.layers.2.self_attn.o_proj.weight"):
        start_trainer(folder)
