"""A checkpoint of one layout continues in every other: the same state bit for bit, and the same next steps."""

import json
import shutil
from dataclasses import asdict, dataclass, replace

import pytest
import torch

from async_rl.export import main
from async_rl.trainer.critic.config import CriticConfig
from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.model import ParallelConfig
from async_rl.weights.pretrained import keep_model_files
from tests.helpers.tiny_models import (
    deepseek_v3_config,
    gpt_oss_config,
    qwen3_moe_config,
    save_checkpoint,
    tiny_config,
)
from tests.helpers.updates import checkpoint_digest
from tests.parallel.processes import result_of
from tests.parallel.ranks import ADAM
from tests.parallel.resharding import NEXT_SEEDS, Chain, pretrained_folder, run_chains, whole_tensors
from tests.parallel.support import (
    MARKS,
    TRAINER,
    VOCAB,
    assert_equal_metrics,
    assert_equal_weights,
    assert_same,
    expected_step,
    make_batch,
    start_trainer,
)

pytestmark = MARKS

SPLIT = {"distributed_optimizer": True}
MIX = ParallelConfig(tensor=2, expert=2, expert_tensor=1)
QWEN_LINKS = {
    # First, so that the two further processes end before the others continue.
    "four-ranks-split": {"ranks": 4, "parallel": MIX, **SPLIT},
    "shared-heads": {"ranks": 4, "parallel": ParallelConfig(tensor=4)},  # 2 key-value heads, each on two ranks
    "tensor": {"parallel": ParallelConfig(tensor=2)},
    "expert": {"parallel": ParallelConfig(expert=2)},
    "data-split": SPLIT,
    "virtual-pipeline": {"parallel": ParallelConfig(pipeline=2, virtual_pipeline=2)},
    "tensor-expert-split-fused": {"parallel": MIX, **SPLIT, "fused": True},
    "uneven-pipeline": {"ranks": 3, "parallel": ParallelConfig(pipeline=3)},  # 4 layers: (1, 2, 1)
    "context": {"parallel": ParallelConfig(context=2)},
    "expert-tensor": {"parallel": ParallelConfig(expert_tensor=2)},
}
# bfloat16 weights with float32 ones next to them, frozen weights of a KL term; DeepSeek-V3 has the others.
BFLOAT16 = {"dtype": "bfloat16", "fp32_lm_head": True, "loss": DecoupledPPO(kl_coefficient=0.1)}
DEEPSEEK_LINKS = {
    "tensor-split": {"parallel": ParallelConfig(tensor=2), **SPLIT},
    "expert-fused": {"parallel": ParallelConfig(expert=2), "fused": True},
    "uneven-pipeline": {"parallel": ParallelConfig(pipeline=2)},  # 3 layers: (2, 1)
    "expert-split": {"parallel": ParallelConfig(expert=2), **SPLIT},
}
# A value model with a trunk and an optimizer of its own, next to the policy.
CRITIC = {"critic": CriticConfig(optimizer=ADAM, updates=2)}
CRITIC_LINKS = {
    "tensor-split": {"parallel": ParallelConfig(tensor=2), **SPLIT},
    "virtual-pipeline": {"parallel": ParallelConfig(pipeline=2, virtual_pipeline=2)},
    "data-split": SPLIT,
    "expert": {"parallel": ParallelConfig(expert=2)},
    "context": {"parallel": ParallelConfig(context=2)},
}
# Split sinks, and biases of experts.
GPT_OSS_LINKS = {
    "tensor": {"parallel": ParallelConfig(tensor=2)},
    "expert-tensor-split": {"parallel": ParallelConfig(expert_tensor=2), **SPLIT},
}
# Decay rates in float32 between bfloat16 weights, and input projections of several tensors.
HYBRID_LINKS = {
    "tensor-split": {"parallel": ParallelConfig(tensor=2), **SPLIT},
    "context": {"parallel": ParallelConfig(context=2)},
}
MODELS = {
    "qwen": (qwen3_moe_config(rope_theta=1000.0, tie_word_embeddings=True), {"links": QWEN_LINKS}),
    "deepseek": (deepseek_v3_config(), {"links": DEEPSEEK_LINKS, "settings": BFLOAT16, "layers": 2}),
    "gpt_oss": (gpt_oss_config(), {"links": GPT_OSS_LINKS, "layers": 4}),
    "hybrid": (tiny_config("qwen3_5_moe_text"), {"links": HYBRID_LINKS, "settings": BFLOAT16, "layers": 4}),
    "critic": (qwen3_moe_config(rope_theta=1000.0), {"links": CRITIC_LINKS, "settings": CRITIC}),
}
CASES = [(family, name) for family, (_, chain) in MODELS.items() for name in (*chain["links"], "one")]


@dataclass
class Outcome:
    expected: dict
    """The next steps of one rank that was never restored."""
    results: dict
    """The next steps of every link."""
    saved: dict
    """The tensors of every link."""
    chain: Chain


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """One rank saves, four and two carry the state through the links, one restores the last link."""
    folder = tmp_path_factory.mktemp("chains")
    chains = {
        family: Chain(
            checkpoint=save_checkpoint(config, folder / family / "model", seed=3), folder=folder / family, **chain
        )
        for family, (config, chain) in MODELS.items()
    }
    expected = {family: chain.start() for family, chain in chains.items()}
    run_chains(list(chains.values()))
    found = {}
    for family, chain in chains.items():
        results = {name: result_of(chain.folder, name) for name in chain.links}
        results["one"] = chain.end("one", **SPLIT)
        saved = {name: whole_tensors(chain.folder / name) for name in ("start", *results)}
        found[family] = Outcome(expected[family], results, saved, chain)
    return found


@pytest.mark.parametrize(("family", "name"), CASES)
def test_state_and_hugging_face_checkpoint_pass_through_a_layout_bit_for_bit(outcomes, family, name):
    before, after = outcomes[family].saved["start"], outcomes[family].saved[name]
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        rows = VOCAB if key.endswith(("word_embeddings.weight", "output_layer.weight")) else None
        assert torch.equal(after[key][:rows], tensor[:rows]), key
    folder = outcomes[family].chain.folder
    expected = checkpoint_digest(pretrained_folder(folder / "start"))
    assert checkpoint_digest(pretrained_folder(folder / name)) == expected


@pytest.mark.parametrize(("family", "name"), [("qwen", "four-ranks-split"), ("deepseek", "expert-split")])
def test_export_writes_the_same_from_a_checkpoint_of_several_ranks(outcomes, family, name, tmp_path):
    chain = outcomes[family].chain
    settings = {"ranks": 2, **chain.settings, **chain.links[name]}
    settings = {key: value for key, value in settings.items() if key not in ("loss", "fused")}
    (tmp_path / "config.yaml").write_text(json.dumps({"trainer": asdict(replace(TRAINER, **settings))}))
    keep_model_files(chain.checkpoint, tmp_path / "model")
    checkpoint = tmp_path / "checkpoints" / "step-000004"
    shutil.copytree(chain.folder / name, checkpoint / "trainer")
    (checkpoint / "run.json").touch()
    assert main([str(tmp_path)]) == 0
    exported = tmp_path / "export" / "step-000004"
    assert checkpoint_digest(exported) == checkpoint_digest(pretrained_folder(chain.folder / "start"))
    config = json.loads((exported / "config.json").read_text())
    assert config["dtype"] == chain.settings.get("dtype", "float32")


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_restart_in_the_same_layout_is_exact(outcomes, family, name):
    result = outcomes[family].results[name]
    repeated = result["repeated"]
    assert str(repeated["metrics"]) == str(result["metrics"])  # nan is nan
    assert_same(repeated["weights"], result["weights"])
    assert torch.equal(repeated["draw"], result["draw"]), "random numbers continue"
    assert not torch.equal(result["draw"], outcomes[family].expected["draw"]), "in the same layout alone"


@pytest.mark.parametrize(("family", "name"), [case for case in CASES if case[0] == "qwen"])
def test_the_next_steps_are_those_of_the_layout_before(outcomes, family, name):
    got, expected = outcomes[family].results[name], outcomes[family].expected
    # An update of this kind, not the same: the reference is of the weights at the start.
    reference = expected_step(outcomes[family].chain.checkpoint, make_batch(seed=NEXT_SEEDS[0]))
    for ours, theirs in zip(got["metrics"], expected["metrics"], strict=True):
        assert theirs["grad_norm"] > ADAM.clip_grad  # so that clipping is seen, too
        assert_equal_metrics(ours, theirs, reference)
        assert ours["lr"] == theirs["lr"]
    assert_equal_weights(got["weights"], expected["weights"], reference, optimizer=ADAM, updates=len(NEXT_SEEDS))


def test_a_trainer_checkpoint_has_weights_optimizer_and_reference(outcomes):
    saved = outcomes["deepseek"].saved["start"]
    names = set(saved)
    weights = {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "decoder.layers.0.self_attention.linear_kv_down_proj.weight",
        "decoder.layers.1.mlp.experts.experts.linear_fc2.weight",
        "decoder.layers.1.mlp.shared_experts.linear_fc2.weight",
        "decoder.layers.1.mlp.router.weight",
    }
    state = ("optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.float32", "reference")
    assert names >= weights | {f"{kind}.{name}" for kind in state for name in weights}
    assert names >= {"decoder.layers.1.mlp.router.expert_bias", "reference.decoder.layers.1.mlp.router.expert_bias"}
    assert saved["optimizer.float32.output_layer.weight"].dtype == torch.float32


def test_the_critic_has_weights_and_optimizer_state_in_a_checkpoint(outcomes):
    saved = outcomes["critic"].saved["start"]
    trunk = {name for name in saved if name.startswith("critic.")}
    policy = {name for name in saved if f"critic.{name}" in trunk}
    assert trunk == {f"critic.{name}" for name in policy} | {"critic.value_head.weight", "critic.value_head.bias"}
    assert "output_layer.weight" in saved and "output_layer.weight" not in policy
    assert saved.keys() >= {f"optimizer.{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in trunk}
    assert saved["critic.value_head.weight"].abs().max() > 0
    assert not torch.equal(saved["critic.decoder.final_layernorm.weight"], saved["decoder.final_layernorm.weight"])


def test_the_critic_of_a_layout_continues_as_that_of_one_rank(outcomes):
    expected = outcomes["critic"].expected
    for name, got in outcomes["critic"].results.items():
        for ours, theirs in zip(got["metrics"], expected["metrics"], strict=True):
            for key in ("critic/loss", "critic/grad_norm", "critic/value_mean", "loss", "grad_norm"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), (name, key)
            assert ours["critic/updates"] == theirs["critic/updates"]


def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(outcomes):
    chain = outcomes["qwen"].chain
    assert (chain.folder / "told").read_text()
    assert (chain.folder / "killed.partial").is_dir()
    trainer = start_trainer(chain.checkpoint, optimizer=ADAM)
    trainer.restore(chain.folder / "killed")
    trainer.close()
    assert not (chain.folder / "killed.partial").exists()
    assert_same(whole_tensors(chain.folder / "killed"), outcomes["qwen"].saved["start"])
