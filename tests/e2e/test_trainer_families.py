"""Every model family against transformers: weights, logits, live and replayed routing, gradients, and export."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.model import LoraConfig, ParallelConfig
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.model_info import CheckpointError
from async_rl.weights.pretrained import keep_model_files
from tests.conformance.reference import routers_of
from tests.helpers import numerics, tiny_models
from tests.parallel.support import (
    MARKS,
    NO_UPDATE,
    TRAINER,
    assert_equal_steps,
    assert_near,
    checkpoint_names,
    exported,
    gradients,
    live_routing,
    load_reference,
    make_batch,
    policy_terms,
    reference_step,
    start_trainer,
    training_batch_of,
)

pytestmark = MARKS

LOSS = DecoupledPPO(entropy_coefficient=0.01)
SMALL_LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
}
MODELS = {
    "deepseek_v3": lambda: tiny_models.deepseek_v3_config(**SMALL_LATENT),
    "deepseek_v3-yarn-whole-query": lambda: tiny_models.deepseek_v3_config(
        **{**SMALL_LATENT, "q_lora_rank": None, "n_shared_experts": 2},
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    ),
    "glm4_moe": lambda: tiny_models.glm4_moe_config(num_hidden_layers=3),
    "glm4_moe-plain": lambda: tiny_models.glm4_moe_config(
        num_hidden_layers=3, attention_bias=False, use_qk_norm=False, n_group=4, topk_group=4
    ),
    "gpt_oss": lambda: tiny_models.gpt_oss_config(num_hidden_layers=3),
    "llama": lambda: tiny_models.llama_config(num_hidden_layers=2),
    "llama-tied": lambda: tiny_models.llama_config(num_hidden_layers=2, tie_word_embeddings=True),
    "mixtral": lambda: tiny_models.mixtral_config(num_hidden_layers=2),
    "olmoe": lambda: tiny_models.olmoe_config(num_hidden_layers=2),
    "qwen2": lambda: tiny_models.qwen2_config(num_hidden_layers=2),
    "qwen2_moe": lambda: tiny_models.qwen2_moe_config(num_hidden_layers=3),
    "qwen2_moe-normed": lambda: tiny_models.qwen2_moe_config(num_hidden_layers=2, norm_topk_prob=True, qkv_bias=False),
    "qwen3": lambda: tiny_models.qwen3_dense_config(num_hidden_layers=2),
    "qwen3-tied-yarn": lambda: tiny_models.qwen3_dense_config(
        num_hidden_layers=2, tie_word_embeddings=True, rope_parameters=YARN
    ),
    "qwen3_moe": lambda: tiny_models.qwen3_moe_config(num_hidden_layers=3),
}
with_experts = pytest.mark.parametrize(
    "case", [name for name in MODELS if name.split("-")[0] not in ("llama", "qwen2", "qwen3")], indirect=True
)
with_correction_bias = pytest.mark.parametrize(
    "case", [name for name in MODELS if name.startswith(("deepseek_v3", "glm4_moe"))], indirect=True
)


class Case:
    """A checkpoint, the model in transformers, and its trainer, without updates."""

    def __init__(self, name, folder):
        self.checkpoint = tiny_models.save_checkpoint(MODELS[name](), folder, seed=1, vectors=True)
        self.reference = load_reference(self.checkpoint)
        self.exact = numerics.float64_model(self.reference)
        self.layers = len(routers_of(self.reference))
        self.replay = "R3" if self.layers else "none"
        self.trainer = self.start()

    def start(self, *, loss=LOSS, optimizer=NO_UPDATE, **changes):
        return start_trainer(
            self.checkpoint, loss=loss, optimizer=optimizer, **{"router_replay": self.replay, **changes}
        )

    def batch(self, lengths=(23, 9, 31, 14), **changes):
        batch = make_batch(lengths, routed=self.layers > 0, layers=self.layers, **changes)
        batch["token_ids"].clamp_(min=1)  # transformers takes no gradient for the padding token, 0
        return batch

    def expected(self, batch, *, routed=True):
        """One update of `batch` by transformers; routed: over its rows, if the model has routers."""
        return reference_step(self.reference, batch, policy_terms(LOSS), routed=routed and self.layers > 0)


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    case = Case(request.param, tmp_path_factory.mktemp("families") / request.param)
    yield case
    case.trainer.close()


def saved(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def run_forward(trainer, batch, *, packing, replay="none"):
    """([logits of each sequence], routing as recorded) of one micro-batch with all sequences."""
    from async_rl.trainer.batch.micro_batch import Coordinates
    from async_rl.trainer.step import MicroBatchBuilder

    plan = trainer._planner.whole(training_batch_of(batch))
    builder = MicroBatchBuilder(
        plan.batch,
        plan.updates[0],
        at=Coordinates(),
        device=torch.device("cpu"),
        packing=packing,
        shares_prefixes=False,
        replay=replay,
        routing=None,
        layers=trainer.model.replay.layers if trainer.model.replay else (),
        rotary=trainer.model.rotary,
    )
    micro_batch = builder.build(range(len(batch)))
    with torch.no_grad():
        hidden = micro_batch.forward(trainer.model.wrapped[0], at=Coordinates())[0]
        logits = hidden @ trainer.model.output_layer(float32=False).multiplied().T
    rows = micro_batch.context.rows
    real = [(rows.nodes == i) & (rows.index >= 0) for i in range(len(batch))]
    return [logits[rows_of] for rows_of in real], micro_batch.context.routing, real


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_logits_equal_those_of_transformers(case, packing):
    batch = case.batch()
    logits, _, _ = run_forward(case.trainer, batch, packing=packing)
    exact, single = [], []
    for ids, length in zip(batch["token_ids"], batch["lengths"].tolist(), strict=True):
        with torch.no_grad():
            single.append(case.reference(ids[None, :length]).logits[0])
            with numerics.float64_forward():
                exact.append(case.exact(ids[None, :length]).logits[0])
    expected = torch.cat(exact)
    assert_near(torch.cat(logits), expected, bound=numerics.FACTOR * numerics.error(torch.cat(single), expected))


@with_experts
def test_live_routing_equals_that_of_transformers(case):
    batch = case.batch()
    _, routing, real = run_forward(case.trainer, batch, packing=True, replay="R2")
    tables = torch.stack([routing.tables[layer] for layer in case.trainer.model.replay.layers], dim=1)
    expected = [
        live_routing(case.reference, ids[:length])
        for ids, length in zip(batch["token_ids"], batch["lengths"].tolist(), strict=True)
    ]
    for rows, theirs in zip(real, expected, strict=True):
        assert torch.equal(tables[rows].sort(-1).values, theirs)
    assert len(torch.cat(expected).flatten(1).unique(dim=0)) > 12  # routing varies from token to token


def test_update_equals_that_of_a_reference_forced_to_the_same_experts(case):
    batch = case.batch()
    expected = case.expected(batch)
    metrics = case.trainer.train(batch)
    ours = gradients(case.trainer)
    assert_equal_steps(metrics["loss"], ours, expected)
    routers = [grad for name, grad in ours.items() if name.endswith((".gate.weight", ".router.weight"))]
    assert len(routers) == case.layers
    # Each tensor is compared relative to its largest entry: the bound would be above 1 if one were rounding alone.
    assert expected.gradient_bound < 1e-2


@with_experts
def test_recording_and_replaying_in_the_trainer_equals_the_live_router(case):
    batch = case.batch()
    expected = case.expected(batch, routed=False)
    trainer = case.start(router_replay="R2")
    metrics = trainer.train(batch)
    assert metrics["routing/overlap"] == 1.0
    assert_equal_steps(metrics["loss"], gradients(trainer), expected)


@pytest.mark.parametrize("changes", [{"packing": False}, {"recompute": "full"}, {"recompute": "selective"}], ids=str)
def test_padding_and_recomputation_change_nothing(case, changes):
    batch = case.batch()
    other = case.start(**changes)
    metrics = other.train(batch)
    assert_equal_steps(metrics["loss"], gradients(other), case.expected(batch))


def test_weights_survive_the_way_through_megatron_bit_for_bit(case):
    ours, theirs = exported(case.start()), saved(case.checkpoint)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_an_exported_checkpoint_loads_in_transformers(case, tmp_path):
    trainer = case.start(optimizer=OptimizerConfig(lr=1e-3))
    batch = case.batch()
    trainer.train(batch)
    weights = exported(trainer)
    before = saved(case.checkpoint)
    trained = {name for name in weights if not torch.equal(weights[name], before[name])}
    # The correction bias is no parameter: it stays unchanged.
    assert trained == {name for name in weights if not name.endswith("e_score_correction_bias")}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((case.checkpoint / "config.json").read_bytes())
    reference = load_reference(tmp_path)
    loaded = checkpoint_names(reference.config.model_type, reference.state_dict())
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    expected = reference_step(reference, batch, policy_terms(LOSS), routed=case.layers > 0)
    mask = batch["loss_mask"]
    assert_near(trainer.logprobs(batch)[mask], expected.logprobs[mask], bound=expected.logprob_bound)


@with_correction_bias
def test_the_correction_bias_stays_float32_in_a_bfloat16_model(case):
    bias = "e_score_correction_bias"
    theirs = {name: weight for name, weight in saved(case.checkpoint).items() if name.endswith(bias)}
    assert theirs
    trainer = case.start(dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-3))
    trainer.train(case.batch())
    ours = exported(trainer)
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert all(weight.dtype == torch.bfloat16 for name, weight in ours.items() if not name.endswith(bias))
    for layer in trainer.model.chunks[0].decoder.layers[1:]:
        assert not layer.mlp.router.local_tokens_per_expert.any()


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen3", {"num_key_value_heads": 4}, r"q_proj.weight \[128, 128\].*linear_qkv.weight"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 48}, r"shared_expert.*\[96, 128\]"),
        ("deepseek_v3", {"kv_lora_rank": 44}, "linear_kv_down_proj.weight"),
    ],
)
def test_weights_of_another_shape_than_the_config_are_refused(tmp_path, family, changes, named):
    checkpoint = tiny_models.save_checkpoint(MODELS[family](), tmp_path, seed=1)
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=named):
        start_trainer(checkpoint, router_replay="none")


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_for_multi_token_prediction_are_exported_unchanged(tmp_path, family):
    checkpoint = tiny_models.save_checkpoint(MODELS[family](), tmp_path / "start", seed=1)
    plain = saved(checkpoint)
    carried = tiny_models.add_prediction_layer(checkpoint)
    trainer = start_trainer(checkpoint, router_replay="none")
    keep_model_files(checkpoint, tmp_path / "model")
    trainer.save_pretrained(tmp_path / "final", like=tmp_path / "model")
    trainer.close()
    final = saved(tmp_path / "final")
    assert final.keys() == plain.keys() | carried.keys()
    assert all(torch.equal(final[name], tensor) for name, tensor in (plain | carried).items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "final")


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (tiny_models.qwen2_moe_config(shared_expert_intermediate_size=95), "95"),
        (tiny_models.olmoe_config(), "all heads"),
    ],
    ids=["shared experts", "norms over all heads"],
)
def test_a_layout_that_tensor_ranks_cannot_split_is_refused(tmp_path, model, named):
    from async_rl.trainer.model.families import read_shape
    from async_rl.trainer.model.layout import layout_problems

    model.save_pretrained(tmp_path)
    config = replace(TRAINER, ranks=2, parallel=ParallelConfig(tensor=2))
    (problem,) = layout_problems(read_shape(tmp_path), config)
    assert "trainer.parallel.tensor is 2" in problem and named in problem


@pytest.mark.parametrize(
    ("size", "changes", "lora", "named"),
    [
        (4, {}, 0, []),
        (4, {}, 4, ["trainer.lora.rank=4"]),
        (8, {}, 0, ["4 attention heads"]),
        (
            6,
            {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 48, "intermediate_size": 384},
            0,
            ["4 key-value heads"],
        ),
        (8, {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 2}, 0, ["20 rows of queries"]),
    ],
)
def test_tensor_ranks_share_key_value_heads_if_their_number_and_the_query_heads_allow(
    tmp_path, size, changes, lora, named
):
    from async_rl.trainer.model.families import read_shape
    from async_rl.trainer.model.layout import layout_problems

    tiny_models.qwen3_dense_config(**changes).save_pretrained(tmp_path)
    config = replace(TRAINER, ranks=size, parallel=ParallelConfig(tensor=size), lora=LoraConfig(rank=lora))
    config = replace(config, router_replay="none")
    problems = list(layout_problems(read_shape(tmp_path), config))
    assert len(problems) == len(named)
    assert all(f"trainer.parallel.tensor is {size}" in p and n in p for p, n in zip(problems, named, strict=True))
