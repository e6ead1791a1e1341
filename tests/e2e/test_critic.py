"""The critic of a trainer rank: values, gradients, steps, checkpoints."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from async_rl.trainer.batch.training_batch import BatchError
from async_rl.trainer.critic import critic as critic_module
from async_rl.trainer.critic.config import CriticConfig
from async_rl.trainer.critic.gae import GAE
from async_rl.trainer.critic.value_head import ValueHead, ValueTerm
from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.flops import train_operations
from async_rl.trainer.model.model import LoraConfig
from async_rl.trainer.state.checkpoint import TrainerCheckpointError
from async_rl.trainer.state.optimizer import OptimizerConfig
from tests.helpers import tiny_models
from tests.helpers.critics import (
    GAMMA_LAM,
    head_gradients,
    reference_update,
    set_head,
    trunk_gradients,
    valued_tokens,
)
from tests.helpers.tiny_models import save_checkpoint
from tests.helpers.versions import mixed_batch
from tests.parallel.parity import TOLERANCE, make_checkpoint, relative
from tests.parallel.resharding import whole_tensors
from tests.parallel.support import (
    MARKS,
    NO_UPDATE,
    TREES,
    assert_same,
    distance,
    exported,
    gradients,
    make_batch,
    make_supervised_batch,
    make_tree_batch,
    start_trainer,
    training_batch_of,
)

pytestmark = MARKS

BOUND = 1e-6
ADAM = OptimizerConfig(lr=1e-3, eps=1e-3)
OWN, SHARED = CriticConfig(optimizer=ADAM), CriticConfig(trunk="shared", coefficient=0.5, optimizer=ADAM)
STILL = CriticConfig(optimizer=NO_UPDATE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model") / "qwen3_moe")


@pytest.fixture(scope="module")
def owner(checkpoint):
    owner = start_trainer(checkpoint)
    yield owner
    owner.close()


@pytest.fixture
def critic_trainer(owner, checkpoint):
    """Starts trainers with a critic, and closes them."""
    started = []

    def start(critic=OWN, *, model=checkpoint, **settings):
        started.append(start_trainer(model, critic=critic, **{"optimizer": ADAM, **settings}))
        return started[-1]

    yield start
    for trainer in started:
        trainer.close()


def train(trainer, batch, *, gae=GAMMA_LAM):
    return trainer.train(batch, advantage=gae)


def valued(trainer, batch, **changes):
    return valued_tokens(trainer, training_batch_of(batch, advantage=GAMMA_LAM, **changes))


# ---- values and gradients


@pytest.mark.parametrize("critic", [OWN, SHARED], ids=["own", "shared"])
def test_values_advantages_and_returns_are_those_of_transformers(critic_trainer, checkpoint, critic):
    trainer, batch, truncated = critic_trainer(critic), make_batch(), [1, 4]
    expected = reference_update(checkpoint, batch, set_head(trainer), truncated=truncated)
    found = valued(trainer, batch, truncated=truncated)
    for name in ("values", "advantages", "returns"):
        assert relative(getattr(found, name), torch.from_numpy(getattr(expected, name))) <= BOUND, name
    tokens = batch["loss_mask"].sum(1).numpy()
    assert found.plan.batch.advantages == pytest.approx(expected.advantages[tokens.cumsum() - tokens], rel=1e-5)


def test_the_gradient_of_the_value_loss_is_that_of_transformers(critic_trainer, checkpoint):
    trainer, batch = critic_trainer(STILL), make_batch()
    expected = reference_update(checkpoint, batch, set_head(trainer))
    metrics = train(trainer, batch)
    ours, head = trunk_gradients(trainer), head_gradients(trainer)
    assert ours.keys() == expected.trunk.keys(), "no output layer"
    assert distance(ours, expected.trunk) <= BOUND and distance(head, expected.head) <= BOUND
    assert max(relative(ours[name], grad) for name, grad in expected.trunk.items()) <= TOLERANCE
    assert metrics["critic/loss"] == pytest.approx(0.5 * np.mean((expected.values - expected.returns) ** 2), rel=BOUND)
    norm = math.sqrt(sum(float((grad**2).sum()) for grad in (*expected.trunk.values(), *expected.head.values())))
    assert metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-5)
    spread = 1 - np.var(expected.returns - expected.values) / np.var(expected.returns)
    assert metrics["critic/explained_variance"] == pytest.approx(spread, rel=1e-5)
    assert metrics["critic/value_mean"] == pytest.approx(expected.values.mean(), rel=1e-5)


@pytest.mark.parametrize("coefficient", [0.5, 0.0])
def test_a_shared_trunk_has_the_gradient_of_the_policy_and_a_part_of_that_of_the_values(critic_trainer, coefficient):
    own = critic_trainer(STILL, optimizer=NO_UPDATE)
    shared = critic_trainer(replace(SHARED, coefficient=coefficient, optimizer=NO_UPDATE), optimizer=NO_UPDATE)
    for trainer in (own, shared):
        set_head(trainer)
        metrics = train(trainer, make_batch())
        assert metrics["critic/loss"] > 0
    policy, values = gradients(own), trunk_gradients(own)
    expected = {name: grad + coefficient * values[name] if name in values else grad for name, grad in policy.items()}
    found = gradients(shared)
    assert max(relative(found[name], grad) for name, grad in expected.items()) <= 2 * BOUND
    ours, theirs = head_gradients(shared), head_gradients(own)
    assert max(relative(ours[name], grad) for name, grad in theirs.items()) <= BOUND


def test_a_clipped_value_loss_is_the_larger_of_both(owner):
    head, torch_rows = ValueHead(2, device=torch.device("cpu")), torch.tensor([[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]])
    with torch.no_grad():
        head.weight[0, 0] = 1.0
    micro_batch = SimpleNamespace(
        loss_rows=torch.arange(3),
        columns={"values": torch.tensor([0.0, 1.9, 4.0]), "returns": torch.tensor([1.5, 0.0, 4.5])},
    )
    loss = ValueTerm(head=head, clip=0.5, weight=1 / 3).loss(torch_rows, micro_batch)
    # V = (1, 2, 3) is taken within (0.5, 2, 3.5): errors (-0.5, 2, -1.5) and (-1, 2, -1).
    assert loss.item() == pytest.approx((1.0 + 4.0 + 2.25) / 6)
    loss.backward()
    assert head.bias.grad.item() == pytest.approx((2.0 - 1.5) / 3), "the clipped value has no gradient"


def test_a_shared_prefix_has_the_same_values_and_gradients(critic_trainer):
    found = []
    for sharing in ("auto", "off"):
        trainer = critic_trainer(STILL, prefix_sharing=sharing)
        set_head(trainer)
        batch = make_tree_batch(TREES["mixed"])
        batch["rewards"] = torch.arange(len(batch), dtype=torch.float64) % 3
        found.append((valued(trainer, batch).values, train(trainer, batch), trunk_gradients(trainer)))
    (ours, metrics, grads), (theirs, _, expected) = found
    assert metrics["tree/compression"] > 1.05
    assert relative(ours, theirs) <= BOUND
    assert max(relative(grads[name], grad) for name, grad in expected.items()) <= 2 * BOUND


# ---- steps


def test_the_critic_learns_and_makes_its_steps_for_each_mini_batch(critic_trainer):
    trainer = critic_trainer(replace(OWN, updates=3, value_clip=0.5), updates_per_batch=2)
    batch = make_batch()
    batch["mini_batch"] = torch.tensor([0, 0, 1, 1, 0, 0])
    metrics = [train(trainer, batch) for _ in range(4)]
    assert [m["critic/updates"] for m in metrics] == [6, 12, 18, 24]
    assert metrics[0]["critic/explained_variance"] == 0 and metrics[0]["critic/value_mean"] == 0, "a head of zeros"
    assert metrics[-1]["critic/loss"] < 0.8 * metrics[0]["critic/loss"]
    assert metrics[-1]["critic/explained_variance"] > 0.1
    assert all(m["critic/lr"] == ADAM.lr and m["critic/grad_norm"] > 0 for m in metrics)


def test_the_operations_of_a_step_are_those_of_policy_and_own_trunk(critic_trainer):
    speeds = []
    for critic in (SHARED, replace(OWN, updates=2)):
        trainer = critic_trainer(critic)
        plan = trainer._planner.policy(training_batch_of(make_batch(), advantage=GAMMA_LAM))
        speeds.append(trainer.throughput(plan, seconds=1.0)["throughput/train_tflops"])
    (update,) = plan.updates
    once = train_operations(trainer.model.shape, update.runs, num_loss_tokens=0, lora=LoraConfig())
    assert speeds[1] - speeds[0] == pytest.approx(2 * once / 1e12)


def test_the_own_trunk_leaves_the_policy_alone(critic_trainer):
    slow, fast = critic_trainer(), critic_trainer(replace(OWN, updates=4))
    before = [exported(slow), exported(fast)]
    metrics = [train(trainer, make_batch()) for trainer in (slow, fast)]
    assert metrics[0]["loss"] == metrics[1]["loss"], "the values are of the start of the batch"
    after = [exported(slow), exported(fast)]
    assert_same(after[0], after[1])
    assert not torch.equal(before[0]["lm_head.weight"], after[0]["lm_head.weight"])


@pytest.mark.parametrize("critic", [OWN, SHARED], ids=["own", "shared"])
def test_the_policy_does_not_change_while_the_critic_warms_up(critic_trainer, critic):
    trainer = critic_trainer(replace(critic, warmup_steps=2), optimizer=replace(ADAM, warmup_steps=4))
    before, loss = exported(trainer), []
    for step in range(2):
        metrics = train(trainer, make_batch())
        loss.append(metrics["critic/loss"])
        assert metrics["grad_norm"] == 0 and metrics["critic/updates"] == step + 1
        assert metrics["lr"] == pytest.approx(ADAM.lr * (step + 1) / 4), "as for a mini-batch without gradient"
        assert_same(exported(trainer), before)
    assert loss[1] < loss[0]
    assert train(trainer, make_batch())["grad_norm"] > 0
    assert not torch.equal(exported(trainer)["lm_head.weight"], before["lm_head.weight"])


def test_a_mini_batch_without_gradient_counts_as_its_steps(critic_trainer):
    trainer = critic_trainer(replace(OWN, updates=2))
    batch = make_batch()
    batch["informative"] = torch.zeros(6, dtype=torch.bool)
    metrics = train(trainer, batch)
    assert metrics["critic/updates"] == 2 and metrics["critic/grad_norm"] == 0
    assert metrics["critic/loss"] == 0 and metrics["tokens"] == 0


def test_the_staleness_of_the_critic_is_in_its_own_steps(critic_trainer):
    trainer = critic_trainer(replace(OWN, updates=3))
    spans = [[(0, 6), (2, 3)], [(1, 3)]]
    given = mixed_batch(spans, update=2)
    rewards = training_batch_of(make_batch((9, 9)), advantage=GAE()).rewards
    metrics = trainer.train(replace(given, rewards=rewards))
    assert metrics["critic/staleness"] == pytest.approx(3 * (6 * 2 + 3 * 1) / 12)


def test_the_penalty_of_each_token_is_its_kl(critic_trainer, monkeypatch):
    trainer = critic_trainer(loss=DecoupledPPO(kl_coefficient=0.3, kl_in="reward"), router_replay="none")
    train(trainer, make_batch(seed=1))  # away from the reference
    seen, original = [], critic_module.batch_advantages
    monkeypatch.setattr(
        critic_module,
        "batch_advantages",
        lambda *args, **options: seen.append(options["penalties"]) or original(*args, **options),
    )
    batch = make_batch(seed=2)
    proximal = torch.cat(trainer.logprobs(training_batch_of(batch)))
    with trainer._reference.loaded():
        reference = torch.cat(trainer.logprobs(training_batch_of(batch)))
    metrics = train(trainer, batch)
    expected = 0.3 * (proximal - reference).double().numpy()
    assert np.abs(expected).max() > 1e-4
    assert seen[0] == pytest.approx(expected, abs=1e-9)
    assert metrics["kl/penalty"] == pytest.approx(expected.sum() / 6, rel=1e-6)


def test_a_batch_without_rewards_of_gae_is_refused(critic_trainer):
    trainer = critic_trainer()
    with pytest.raises(BatchError, match="rewards"):
        trainer.train(training_batch_of(make_batch()))


# ---- state

KINDS = {
    "own": {},
    "shared": {"critic": replace(SHARED, warmup_steps=2)},
    "several steps": {"critic": replace(OWN, updates=2, warmup_steps=2)},
    "split optimizer": {"distributed_optimizer": True},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 shared and split": {"dtype": "bfloat16", "critic": SHARED, "distributed_optimizer": True},
    "adapters": {"lora": LoraConfig(rank=4)},
    "recorded router": {"router_replay": "R2"},
    "live router": {"router_replay": "none", "critic": SHARED},
    "padded": {"packing": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_from_a_checkpoint_as_without_a_restart(critic_trainer, tmp_path, kind):
    first = critic_trainer(**KINDS[kind])
    train(first, make_batch(seed=1))
    first.save(tmp_path / "state").result()
    second = critic_trainer(**KINDS[kind])
    second.restore(tmp_path / "state")
    for seed in (2, 3):
        assert str(train(first, make_batch(seed=seed))) == str(train(second, make_batch(seed=seed)))
    first.save(tmp_path / "first").result()
    second.save(tmp_path / "second").result()
    saved = whole_tensors(tmp_path / "first")
    assert_same(whole_tensors(tmp_path / "second"), saved)
    trunk = {name for name in saved if name.startswith("critic.decoder")}
    assert {"critic.value_head.weight", "optimizer.exp_avg.critic.value_head.bias"} <= saved.keys()
    assert bool(trunk) == ("shared" not in kind and kind != "live router")
    assert not any("output_layer" in name for name in saved if "critic." in name)


def test_a_checkpoint_without_a_critic_starts_it_with_the_weights_of_the_policy(critic_trainer, tmp_path):
    without = critic_trainer(None)
    without.train(make_batch(seed=1))
    without.save(tmp_path / "without").result()
    trainer = critic_trainer(replace(OWN, warmup_steps=1))
    train(trainer, make_batch(seed=3))
    trainer.restore(tmp_path / "without")
    assert_same(trunk_weights(trainer), {n: w for n, w in exported(trainer).items() if n != "lm_head.weight"})
    metrics = train(trainer, make_batch(seed=2))
    assert metrics["critic/updates"] == 1 and metrics["grad_norm"] == 0 and metrics["critic/value_mean"] == 0


def test_a_trainer_without_a_critic_leaves_that_of_a_checkpoint_out(critic_trainer, tmp_path):
    trainer, without = critic_trainer(), critic_trainer(None)
    train(trainer, make_batch(seed=1))
    trainer.save(tmp_path / "state").result()
    without.restore(tmp_path / "state")
    assert_same(exported(without), exported(trainer))


def test_a_checkpoint_with_another_critic_is_refused(critic_trainer, tmp_path):
    trainer = critic_trainer()
    trainer.save(tmp_path / "state").result()
    with pytest.raises(TrainerCheckpointError, match=r"critic\.trunk"):
        critic_trainer(SHARED).restore(tmp_path / "state")


def trunk_weights(trainer):
    return exported(SimpleNamespace(model=trainer._critic._trunk))


@pytest.mark.parametrize("given", [False, True])
def test_after_a_warm_start_the_critic_starts_with_the_weights_of_the_policy(critic_trainer, checkpoint, given):
    trainer = critic_trainer(replace(OWN, checkpoint=checkpoint if given else None))
    before = trunk_weights(trainer)
    train(trainer, make_batch())
    trainer.train_supervised(make_supervised_batch())
    trainer.reset_optimizer(ADAM)
    policy = {name: weight for name, weight in exported(trainer).items() if name != "lm_head.weight"}
    if not given:
        assert_same(trunk_weights(trainer), policy)
    assert not torch.equal(before["model.norm.weight"], policy["model.norm.weight"])
    assert train(trainer, make_batch())["critic/value_mean"] == 0
    assert trainer._critic.saved().steps == 1


def test_the_critic_of_tied_embeddings_has_no_output_layer(critic_trainer, tmp_path):
    config = tiny_models.qwen3_moe_config(rope_theta=1000.0, tie_word_embeddings=True)
    trainer = critic_trainer(model=save_checkpoint(config, tmp_path / "tied", seed=3))
    assert trunk_weights(trainer).keys() == exported(trainer).keys()
    train(trainer, make_batch())
    trainer.save(tmp_path / "state").result()
    trainer.restore(tmp_path / "state")


@pytest.mark.parametrize(("changes", "named"), [({"vocab_size": 130}, "token ids"), ({"num_experts": 4}, "experts")])
def test_a_critic_of_another_model_is_refused(critic_trainer, tmp_path, changes, named):
    other = save_checkpoint(tiny_models.qwen3_moe_config(**{"rope_theta": 1000.0, **changes}), tmp_path / "m", seed=3)
    with pytest.raises(ValueError, match=f"critic.checkpoint.*{named}"):
        critic_trainer(replace(OWN, checkpoint=other))
