"""A checkpoint of one layout goes on in every other: the same state bit for bit, and the same next steps."""

import pytest
import torch

from async_rl.train.losses import LossConfig
from async_rl.train.model import ParallelConfig
from tests.parallel.resharding import begin, restore_here, run_chain, whole_tensors
from tests.parallel.support import VOCAB, distance
from tests.tiny_models import deepseek_v3_config, qwen3_moe_config, save_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(300),
]

SPLIT = {"distributed_optimizer": True}
QWEN_LINKS = {
    "tensor": {"parallel": ParallelConfig(tensor=2)},
    "expert": {"parallel": ParallelConfig(expert=2)},
    "data-split": SPLIT,
    "virtual-pipeline": {"parallel": ParallelConfig(pipeline=2, virtual_pipeline=2)},
    "tensor-expert-split": {"parallel": ParallelConfig(tensor=2, expert=2, expert_tensor=1), **SPLIT},
    "context": {"parallel": ParallelConfig(context=2)},
    "expert-tensor": {"parallel": ParallelConfig(expert_tensor=2)},
    "data": {},
}
# bfloat16 weights with float32 ones beside them, frozen weights of a KL term; DeepSeek-V3 has the rest of it.
BFLOAT16 = {"dtype": "bfloat16", "fp32_lm_head": True, "loss": LossConfig(kl_coefficient=0.1)}
DEEPSEEK_LINKS = {
    "tensor-split": {"parallel": ParallelConfig(tensor=2), **SPLIT},
    "expert": {"parallel": ParallelConfig(expert=2)},
    "expert-split": {"parallel": ParallelConfig(expert=2), **SPLIT},
    "data-split": SPLIT,
    "tensor": {"parallel": ParallelConfig(tensor=2)},
}
TIED_LINKS = {
    "pipeline-split": {"parallel": ParallelConfig(pipeline=2), **SPLIT},
    "tensor": {"parallel": ParallelConfig(tensor=2)},
    "pipeline": {"parallel": ParallelConfig(pipeline=2)},
}


class Chain:
    """One rank saves, `links` carry it on, one rank restores it from the last of them."""

    def __init__(self, config, links, folder, *, layers=3, **settings):
        checkpoint = save_checkpoint(config, folder / "model", seed=3)
        self.expected = begin(checkpoint, folder / "begin", layers=layers, **settings)
        self.results = run_chain(
            checkpoint,
            folder / "begin",
            {name: {**settings, **changes} for name, changes in links.items()},
            folder,
            ranks=2,
            layers=layers,
        )
        for name, result in self.results.items():
            assert isinstance(result, dict), f"{name}: {result}"
        self.results["one"] = restore_here(
            checkpoint, folder / list(links)[-1], folder / "one", layers=layers, **settings, **SPLIT
        )
        self.saved = {name: whole_tensors(folder / name) for name in ("begin", *self.results)}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Chain(qwen3_moe_config(rope_theta=1000.0), QWEN_LINKS, tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return Chain(deepseek_v3_config(), DEEPSEEK_LINKS, tmp_path_factory.mktemp("deepseek"), layers=2, **BFLOAT16)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return Chain(qwen3_moe_config(tie_word_embeddings=True), TIED_LINKS, tmp_path_factory.mktemp("tied"))


CASES = [
    (family, name)
    for family, links in (("qwen", QWEN_LINKS), ("deepseek", DEEPSEEK_LINKS), ("tied", TIED_LINKS))
    for name in (*links, "one")
]


@pytest.fixture
def chain(request, family):
    return request.getfixturevalue(family)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_whole_state_passes_through_a_layout_bit_for_bit(chain, name):
    before, after = chain.saved["begin"], chain.saved[name]
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        rows = VOCAB if key.endswith(("word_embeddings.weight", "output_layer.weight")) else None
        assert torch.equal(after[key][:rows], tensor[:rows]), key


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_restart_in_the_same_layout_is_exact(chain, name):
    result = chain.results[name]
    assert str(result["repeated"]["metrics"]) == str(result["metrics"])  # nan is nan
    weights = result["repeated"]["weights"]
    assert all(torch.equal(weights[key], tensor) for key, tensor in result["weights"].items())


@pytest.mark.parametrize(("family", "name"), [case for case in CASES if case[0] != "deepseek"])
def test_the_next_steps_are_those_of_the_layout_before(chain, name):
    for ours, theirs in zip(chain.results[name]["metrics"], chain.expected["metrics"], strict=True):
        for key in ("loss", "grad_norm", "entropy", "mismatch/k1"):
            assert ours[key] == pytest.approx(theirs[key], rel=2e-6, abs=1e-8), key
        assert ours["lr"] == theirs["lr"]
    assert distance(chain.results[name]["weights"], chain.expected["weights"]) <= 2e-6


def test_everything_is_in_it(deepseek):
    names = set(deepseek.saved["begin"])
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
    assert deepseek.saved["begin"]["optimizer.float32.output_layer.weight"].dtype == torch.float32
