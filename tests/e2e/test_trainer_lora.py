"""LoRA on one rank: gradients, the merged weights, what is trained and kept, and the files."""

import json
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.model import LoraConfig
from async_rl.trainer.state.checkpoint import TrainerCheckpointError
from async_rl.trainer.state.optimizer import OptimizerConfig
from tests.e2e.families import MODELS, Family
from tests.helpers import numerics, tiny_models
from tests.parallel.lora import LORA, add_adapters, start_lora_trainer
from tests.parallel.resharding import whole_tensors
from tests.parallel.support import (
    MARKS,
    assert_equal_steps,
    assert_near,
    assert_same,
    expected_step,
    exported,
    gradients,
    load_reference,
    policy_terms,
    reference_step,
    start_trainer,
)

pytestmark = [*MARKS, pytest.mark.usefixtures("owner")]

ADAM = OptimizerConfig(lr=1e-2, weight_decay=0.01)
TWO_FAMILIES = pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"], indirect=True)


class Model(Family):
    """A family whose trainers have adapters."""

    def start(self, **changes):
        return start_lora_trainer(self.checkpoint, **(self.settings | changes))

    def expected_of(self, trainer, batch):
        """One update of `batch` by transformers with the adapters of the trainer."""
        reference = load_reference(self.checkpoint)
        names = add_adapters(reference, exported(trainer, adapters=True), scale=LORA.alpha / LORA.rank)
        found = reference_step(reference, batch, policy_terms(DecoupledPPO()), routed=self.layers > 0)
        return replace(found, gradients={names[name]: gradient for name, gradient in found.gradients.items()})


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3"])
def model(request, tmp_path_factory):
    return Model(MODELS[request.param](), tmp_path_factory.mktemp("lora"))


def base_weights(trainer):
    from async_rl.trainer.model.convert import named_weights

    return {name: weight.detach().clone() for name, weight in named_weights(trainer.model.chunks)}


@pytest.mark.parametrize("changes", [{}, {"recompute": "full"}, {"recompute": "selective", "packing": False}], ids=str)
def test_gradients_of_adapters_equal_those_of_a_float64_reference(model, changes):
    trainer, batch = model.start(**changes), model.batch()
    expected = model.expected_of(trainer, batch)
    metrics = trainer.train(batch)
    assert_equal_steps(metrics["loss"], gradients(trainer, adapters=True), expected)
    assert all(gradient.any() for gradient in expected.gradients.values())
    assert expected.gradient_bound < 1e-2
    norm = torch.stack([g.double().square().sum() for g in expected.gradients.values()]).sum().sqrt().item()
    numerics.assert_within(abs(metrics["grad_norm"] - norm), expected.distance_bound * norm)


def test_the_start_weights_are_those_of_the_checkpoint_bit_for_bit(model):
    trainer, plain = model.start(spread=False), start_trainer(model.checkpoint, **model.settings)
    assert_same(exported(trainer), exported(plain))
    batch = model.batch()
    # The same weights elsewhere in memory may be added up in another order.
    bound = 2 * model.expected_of(trainer, batch).logprob_bound
    assert_near(trainer.logprobs(batch), plain.logprobs(batch), bound=bound)


def test_updates_change_every_adapted_weight_and_no_base_weight(model):
    trainer = model.start(spread=False, optimizer=ADAM)
    base, merged = base_weights(trainer), exported(trainer)
    for seed in (1, 2):
        trainer.train(model.batch(seed=seed))
    now = exported(trainer)
    assert_same(base_weights(trainer), base)
    adapted = {name.replace(".lora_A", "") for name in exported(trainer, adapters=True) if ".lora_A" in name}
    assert {name for name, weight in merged.items() if not torch.equal(now[name], weight)} == adapted
    frozen = ("embed_tokens", "lm_head", "norm", ".gate.", "bias", "shared_expert_gate")
    assert {name for name in merged if name not in adapted} == {n for n in merged if any(f in n for f in frozen)}
    # Only adapters have gradients and optimizer state.
    adapters = sum(tensor.numel() for tensor in exported(trainer, adapters=True).values())
    buffers = [b for w in trainer.model.wrapped for b in (*w.buffers, *w.expert_parallel_buffers)]
    state = [t for part in trainer._optimizer._parts() for s in part.optimizer.state.values() for t in s.values()]
    assert adapters <= sum(b.grad_data.numel() for b in buffers) < 1.05 * adapters + 1024
    assert sum(t.numel() for t in state if t.dim()) == 2 * adapters  # both moments
    assert adapters < sum(t.numel() for t in now.values()) / 4


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_a_merged_weight_is_not_kept_for_the_backward_pass(model):
    trainer = model.start()
    layer = trainer.model.chunks[0].decoder.layers[0].self_attention.linear_qkv
    merge, merged = layer.lora.merge, []

    def watched(weight):
        whole = merge(weight)
        merged.append(weakref.ref(whole))
        return whole

    layer.lora.merge = watched
    output, _ = layer(torch.randn(3, 1, 128, requires_grad=True))
    assert [kept() for kept in merged] == [None]
    output.sum().backward()
    assert [kept() for kept in merged] == [None, None]


@TWO_FAMILIES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_forward_pass_uses_the_exported_numbers(model, dtype, tmp_path):
    trainer = model.start(dtype=dtype, optimizer=ADAM)
    trainer.train(model.batch())
    trainer.save_pretrained(tmp_path / "final", like=model.checkpoint)
    plain = start_trainer(tmp_path / "final", dtype=dtype, **model.settings)
    assert torch.equal(trainer.logprobs(model.batch()), plain.logprobs(model.batch()))
    assert_same(exported(trainer), exported(plain))


def test_the_merged_checkpoint_loads_in_transformers(model, tmp_path):
    trainer, batch = model.start(optimizer=ADAM), model.batch()
    trainer.train(batch)
    trainer.save_pretrained(tmp_path / "final", like=model.checkpoint)
    expected = expected_step(tmp_path / "final", batch, routed=model.layers > 0)
    mask = batch["loss_mask"]
    assert_near(trainer.logprobs(batch)[mask], expected.logprobs[mask], bound=expected.logprob_bound)


@TWO_FAMILIES
def test_the_adapter_folder_has_the_matrices_under_the_names_of_peft(model, tmp_path):
    trainer = model.start(lora=replace(LORA, target_modules=("v_proj", "q_proj", "down_proj")), optimizer=ADAM)
    trainer.train(model.batch())
    trainer.save_pretrained(tmp_path / "final", like=model.checkpoint)
    folder = tmp_path / "final-adapter"
    fields = json.loads((folder / "adapter_config.json").read_text())
    named = {"peft_type": "LORA", "r": 4, "lora_alpha": 6.0, "base_model_name_or_path": str(model.checkpoint)}
    assert fields.items() >= named.items()
    assert sorted(fields["target_modules"]) == ["down_proj", "q_proj", "v_proj"]
    matrices, merged = load_file(folder / "adapter_model.safetensors"), load_file(tmp_path / "final/model.safetensors")
    start = load_file(model.checkpoint / "model.safetensors")
    prefix, modules = "base_model.model.", {name.rsplit(".lora_")[0] for name in matrices}
    assert prefix + "model.layers.0.self_attn.q_proj" in modules
    assert {name.rsplit(".")[-1] for name in modules} == {"q_proj", "v_proj", "down_proj"}
    for module in modules:
        weight = f"{module.removeprefix(prefix)}.weight"
        if weight in start:  # transformers saves experts fused
            product = matrices[f"{module}.lora_B.weight"].double() @ matrices[f"{module}.lora_A.weight"].double()
            expected = start[weight].double() + LORA.alpha / LORA.rank * product
            assert_near(merged[weight], expected, bound=numerics.rounding(8) * expected.abs().max().item())


@TWO_FAMILIES
def test_the_reference_of_the_kl_term_is_the_start_checkpoint(model):
    loss = DecoupledPPO(kl_coefficient=0.1)
    settings = {"router_replay": "none", "loss": loss, "optimizer": ADAM}
    trainer, batch = model.start(spread=False, **settings), model.batch()
    plain = start_trainer(model.checkpoint, router_replay="none")
    trainer.train(batch)
    with trainer._reference.loaded():
        assert torch.equal(trainer.logprobs(batch), plain.logprobs(batch))
    assert not torch.equal(trainer.logprobs(batch), plain.logprobs(batch))
    adapters = sum(tensor.numel() for tensor in exported(trainer, adapters=True).values())
    assert sum(tensor.numel() for tensor in trainer._reference._frozen.values()) < 1.01 * adapters


@TWO_FAMILIES
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_has_the_adapters_alone_and_resumes_exactly(model, dtype, distributed_optimizer, tmp_path):
    settings = {"dtype": dtype, "distributed_optimizer": distributed_optimizer, "optimizer": ADAM}
    settings |= {"loss": DecoupledPPO(kl_coefficient=0.1)}
    trainer = model.start(**settings)
    trainer.train(model.batch(seed=1))
    trainer.save(tmp_path / "state").result()
    other = model.start(spread=False, **settings)
    other.restore(tmp_path / "state")
    for seed in (2, 3):
        assert str(other.train(model.batch(seed=seed))) == str(trainer.train(model.batch(seed=seed)))
    assert_same(exported(other), exported(trainer))
    saved = whole_tensors(tmp_path / "state")
    assert all(".lora." in name for name in saved)
    kinds = {"", "optimizer.exp_avg.", "optimizer.exp_avg_sq.", "reference."}
    assert {name.split("decoder.")[0] for name in saved} == kinds
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
@pytest.mark.parametrize(
    ("seed", "lora", "field"),
    [
        (1, LoraConfig(), "trainer.lora.rank"),
        (1, replace(LORA, rank=8), "trainer.lora.rank"),
        (1, replace(LORA, alpha=7.0), "trainer.lora.alpha"),
        (1, replace(LORA, target_modules=("q_proj",)), "trainer.lora.target_modules"),
        (2, LORA, "start checkpoint"),
    ],
    ids=str,
)
def test_a_checkpoint_of_other_adapters_or_another_start_is_refused(model, seed, lora, field, tmp_path):
    model.start().save(tmp_path / "state").result()
    start = tiny_models.save_checkpoint(MODELS["qwen3"](), tmp_path / "model", seed=seed, vectors=True)
    with pytest.raises(TrainerCheckpointError, match=field):
        start_trainer(start, lora=lora, router_replay="none").restore(tmp_path / "state")
