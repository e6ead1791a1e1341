"""Several optimizer steps per batch on the real trainer, against plain formulas in float64."""

import weakref
from dataclasses import replace

import pytest
import torch

from async_rl.config import load_config
from async_rl.trainer.loss.losses import GSPO, DecoupledPPO, IcePop
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.trainer.step import MicroBatchBuilder
from tests.helpers import numerics
from tests.parallel.support import (
    LAYERS,
    MARKS,
    TOP_K,
    assert_equal_gradients,
    assert_same,
    exported,
    gradients,
    live_routing,
    load_reference,
    make_batch,
    penalised_advantages,
    reference_step,
    start_trainer,
)

pytestmark = [*MARKS, pytest.mark.usefixtures("owner")]

LENGTHS = (23, 9, 31, 14, 9, 17, 20, 12)
COMMON = {"clip_low": 0.02, "clip_high": 0.03, "aggregation": "sequence_mean"}
LOSSES = {
    "decoupled_ppo": DecoupledPPO(behaviour_weight_cap=1.1, **COMMON),
    "icepop": IcePop(mask_low=0.8, mask_high=1.25, **COMMON),
    "gspo": GSPO(behaviour_weight_cap=1.02, **(COMMON | {"clip_low": 2e-3, "clip_high": 3e-3})),
}
ADAM = OptimizerConfig(lr=3e-4, eps=1e-3, clip_grad=0.0)


@pytest.fixture(scope="module")
def batch(owner):
    """Four mini-batches of one group; engine logprobs near the trainer's."""
    batch = make_batch(LENGTHS)
    batch["token_ids"].clamp_(min=1)  # transformers gives id 0, the padding, no gradient
    batch["behaviour_logprobs"] = behaviour_of(owner, batch)
    batch["mini_batch"] = torch.tensor([2, 0, 3, 1])[batch["group"]]
    return batch


def behaviour_of(owner, batch):
    noise = 0.2 * torch.randn(batch["token_ids"].shape, generator=torch.Generator().manual_seed(5))
    return (owner.logprobs(batch) + noise).clamp(max=0.0)


def plain(name, *, current, proximal, behaviour, advantages, of):
    """The loss of each token [n], written out; of: int64 [n], its trajectory."""
    correction = (proximal - behaviour).exp()
    low, high = 1 - LOSSES[name].clip_low, 1 + LOSSES[name].clip_high

    def clipped(ratio):
        return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)

    match name:
        case "decoupled_ppo":
            return -correction.clamp(max=1.1) * clipped((current - proximal).exp())
        case "icepop":
            inside = (correction >= 0.8) & (correction <= 1.25)
            return -correction * inside * clipped((current - proximal).exp())
        case _:
            s, b = (geometric_mean(d, of) for d in (current - proximal, proximal - behaviour))
            return -b.clamp(max=1.02) * clipped(s)


def geometric_mean(log_ratios, of):
    """Of each token the geometric mean of its trajectory."""
    same = (of.unsqueeze(0) == of.unsqueeze(1)).double()
    return (same @ log_ratios.double() / same.sum(1)).exp()


def plain_terms(name, proximal):
    """For `reference_step`: terms of the mean over trajectories, proximal float64 [S, T].

    The advantages of the batch are [S], or [S, T].
    """

    def terms(batch, logprobs, _entropy):
        mask = batch["loss_mask"]
        of = mask.nonzero()[:, 0]
        losses = plain(
            name,
            current=logprobs[mask],
            proximal=proximal[mask],
            behaviour=batch["behaviour_logprobs"][mask].double(),
            advantages=batch["advantages"][of] if batch["advantages"].dim() == 1 else batch["advantages"][mask],
            of=of,
        )
        return losses / (mask.sum(1)[of] * len(batch))

    return terms


def steps_of(trainer, batch, folder, checkpoint, **options):
    """Metrics of a batch; before each optimizer step the weights, in a folder, and the gradients."""
    step, seen = trainer._optimizer.step, []

    def watched():
        trainer.save_pretrained(folder / f"{len(seen)}", like=checkpoint)
        seen.append((folder / f"{len(seen)}", {name: grad.clone() for name, grad in gradients(trainer).items()}))
        return step()

    trainer._optimizer.step = watched
    return trainer.train(batch, **options), seen


def assert_steps(steps, batch, *, name, proximal):
    """Each step has the gradient of its mini-batch, at its weights."""
    assert len(steps) == 4
    for number, (folder, found) in enumerate(steps):
        part = batch["mini_batch"] == number
        expected = reference_step(load_reference(folder), batch[part], plain_terms(name, proximal[part]))
        assert_equal_gradients(found, expected)


def all_logprobs(_batch, logprobs, _entropy):
    return logprobs


@pytest.mark.parametrize("replay", ["R3", "R2"])
@pytest.mark.parametrize("name", LOSSES)
def test_each_mini_batch_has_the_gradient_of_the_formula(checkpoint, batch, owner, tmp_path, name, replay):
    start = load_reference(checkpoint)
    given = batch if replay == "R3" else rerouted(batch, start, owner)
    trainer = start_trainer(
        checkpoint, loss=LOSSES[name], optimizer=ADAM, updates_per_batch=4, router_replay=replay, micro_batch_tokens=40
    )
    metrics, steps = steps_of(trainer, given, tmp_path, checkpoint)
    proximal = reference_step(start, given, all_logprobs).logprobs
    assert_steps(steps, given, name=name, proximal=proximal)
    assert 0 < metrics["clip/fraction"] < 1
    assert metrics["lr"] == ADAM.lr


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_each_mini_batch_has_advantages_with_the_kl_of_the_whole_batch(checkpoint, batch, tmp_path, name):
    loss = replace(LOSSES["decoupled_ppo"], kl_coefficient=0.3, kl_in="reward")
    trainer = start_trainer(checkpoint, loss=loss, optimizer=ADAM, updates_per_batch=4, micro_batch_tokens=40)
    metrics, steps = steps_of(trainer, batch, tmp_path, checkpoint, advantage=name)
    start, mask = load_reference(checkpoint), batch["loss_mask"]
    proximal = reference_step(start, batch, all_logprobs).logprobs
    reference = reference_step(start, batch, all_logprobs, routed=False).logprobs
    kl = [(p - r)[own] for p, r, own in zip(proximal, reference, mask, strict=True)]
    found = torch.cat(penalised_advantages(batch, kl, name=name, coefficient=0.3))
    given = batch.clone().set("advantages", torch.zeros(mask.shape).double().masked_scatter_(mask, found))
    assert_steps(steps, given, name="decoupled_ppo", proximal=proximal)
    assert metrics["kl/penalty"] == pytest.approx(0.3 * torch.cat(kl).sum().item() / len(batch), rel=1e-3)


def rerouted(batch, model, owner):
    """The batch, sampled over the experts that the model chooses for itself."""
    rows = torch.full((*batch["token_ids"].shape, len(LAYERS), TOP_K), -1)
    exact = numerics.float64_model(model)
    with numerics.float64_forward():
        for i, length in enumerate(batch["lengths"].tolist()):
            rows[i, :length] = live_routing(exact, batch["token_ids"][i, :length])
    made = batch.clone().set("routed_experts", rows.to(torch.int16))
    return made.set("behaviour_logprobs", behaviour_of(owner, made))


@pytest.mark.parametrize("count", [1, 4])
def test_gspo_clips_no_rounding_in_bfloat16(checkpoint, owner, count):
    shipped = load_config(["loss=gspo"]).loss
    assert (shipped.clip_low, shipped.clip_high) == (3e-4, 4e-4)
    batch = make_batch(LENGTHS)
    batch["behaviour_logprobs"] = owner.logprobs(batch)  # float32: the rounding of an engine
    batch["mini_batch"] = batch["group"] % count
    trainer = start_trainer(checkpoint, dtype="bfloat16", loss=shipped, updates_per_batch=count)
    metrics = trainer.train(batch)
    assert metrics["mismatch/abs_mean"] > 1e-3
    assert metrics["clip/fraction"] < 0.01


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_two_micro_batches_exist_at_a_time_however_many_there_are(checkpoint, batch, monkeypatch, recompute):
    live, most, build = weakref.WeakSet(), [], MicroBatchBuilder.build

    def counted(self, numbers):
        made = build(self, numbers)
        live.add(made.context.rotary[0].untyped_storage())  # autograd keeps it too
        most.append(len(live))
        return made

    monkeypatch.setattr(MicroBatchBuilder, "build", counted)
    settings = {"loss": LOSSES["gspo"], "updates_per_batch": 2, "router_replay": "R2", "recompute": recompute}
    trainer = start_trainer(checkpoint, micro_batch_tokens=20, **settings)
    trainer.train(batch.clone().set("mini_batch", batch["group"] % 2))
    assert len(most) > len(LENGTHS)  # in the pass at the start of the batch, and in the updates
    assert max(most) <= 2


def test_a_kill_between_mini_batches_leaves_no_part_of_the_batch(checkpoint, batch, tmp_path):
    options = {"loss": LOSSES["decoupled_ppo"], "optimizer": ADAM, "updates_per_batch": 4}
    whole, killed, after = (start_trainer(checkpoint, **options) for _ in range(3))
    killed.save(tmp_path / "checkpoint").result()
    step, made = killed._optimizer.step, []

    def dies():
        if len(made) == 2:
            raise SystemExit("killed")
        made.append(step())
        return made[-1]

    killed._optimizer.step = dies
    with pytest.raises(SystemExit):
        killed.train(batch)
    after.restore(tmp_path / "checkpoint")
    expected, found = whole.train(batch), after.train(batch)
    assert after._optimizer.updates == whole._optimizer.updates == 4
    assert found == expected
    assert_same(exported(after), exported(whole))
