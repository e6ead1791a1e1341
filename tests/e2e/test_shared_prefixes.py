"""A train step over shared prefixes is that of separate rows: loss, metrics, gradients and logprobs of all kinds."""

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from async_rl.trainer.loss.losses import CISPO, GSPO, M2PO, DecoupledPPO
from async_rl.trainer.model.model import LoraConfig
from tests.parallel.parity import TOLERANCE, make_checkpoint, relative
from tests.parallel.support import (
    MARKS,
    TREE_LENGTHS,
    TREES,
    gradients,
    make_tree_batch,
    start_trainer,
    training_batch_of,
)

pytestmark = MARKS
OTHER_ROWS = [(3, 12), (1, 5)]
WIDE = {"clip_low": 0.9, "clip_high": 9.0}
CASES = {
    "entropy": {"loss": DecoupledPPO(**WIDE, entropy_coefficient=0.01)},
    "reference": {"loss": DecoupledPPO(**WIDE, kl_coefficient=0.1)},
    "penalty": {"loss": DecoupledPPO(**WIDE, kl_coefficient=0.1, kl_in="reward")},
    "gspo": {"loss": GSPO(clip_low=0.9, clip_high=9.0)},
    "m2po": {"loss": M2PO(max_second_moment=1.0)},
    "cispo": {"loss": CISPO()},
    "two updates": {"updates_per_batch": 2},
    "R2": {"router_replay": "R2"},
    "live router": {"router_replay": "none"},
    "threshold": {"replay_threshold": 0.3},
    "adapters": {"lora": LoraConfig(rank=4)},
    "recomputation": {"recompute": "full"},
    "small micro-batches": {"micro_batch_tokens": 60},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model") / "qwen3_moe")


def step(checkpoint, batch, **settings):
    """Metrics, gradients, logprobs after the step, and the metrics of shared prefixes."""
    with contextlib.closing(start_trainer(checkpoint, **{"micro_batch_tokens": 300, **settings})) as trainer:
        metrics = trainer.train(batch)
        found = gradients(trainer, adapters="lora" in settings)
        logprobs = torch.cat(trainer.logprobs(training_batch_of(batch)))
    tree = {name: metrics.pop(name) for name in list(metrics) if name.startswith("tree/")}
    return metrics, found, logprobs, tree


def assert_as_separate(checkpoint, batch, **settings):
    """Train a batch both ways; returns the compression."""
    metrics, found, logprobs, tree = step(checkpoint, batch, prefix_sharing="off", **settings)
    assert tree["tree/compression"] == 1 and tree["tree/tokens"] == tree["tree/unique_tokens"]
    of_shared, shared, logprobs_of_shared, tree_of_shared = step(checkpoint, batch, **settings)
    assert of_shared == pytest.approx(metrics, rel=2e-5, abs=2e-6, nan_ok=True)
    assert relative(logprobs_of_shared, logprobs) <= TOLERANCE
    assert shared.keys() == found.keys()
    off = {name: relative(shared[name], exact) for name, exact in found.items()}
    assert max(off.values()) <= TOLERANCE, max(off, key=off.__getitem__)
    assert tree_of_shared["tree/tokens"] == tree["tree/tokens"]
    return tree_of_shared["tree/compression"]


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("support", [False, True], ids=["whole vocabulary", "support"])
def test_every_shape_is_as_separate_sequences(checkpoint, shape, support):
    batch = make_tree_batch(TREES[shape], support=support, other_rows=OTHER_ROWS)
    assert assert_as_separate(checkpoint, batch) > 1.2


@pytest.mark.parametrize("case", CASES)
def test_every_way_to_train_is_as_with_separate_sequences(checkpoint, case):
    batch = make_tree_batch(TREES["mixed"], other_rows=OTHER_ROWS)
    if "updates_per_batch" in CASES[case]:
        batch["mini_batch"] = batch["group"] % 2
    assert assert_as_separate(checkpoint, batch, **CASES[case]) > 1.2


SHAPES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 21)), min_size=2, max_size=len(TREE_LENGTHS)).map(
    lambda pairs: [(min(of, max(0, number - 1)), tokens if number else 0) for number, (of, tokens) in enumerate(pairs)]
)
ROWS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20)), max_size=3)


@settings(max_examples=8, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=SHAPES, other_rows=ROWS, micro_batch_tokens=st.sampled_from([40, 90, 300]))
def test_random_forests_are_as_separate_sequences(checkpoint, shape, other_rows, micro_batch_tokens):
    batch = make_tree_batch(shape, other_rows=other_rows)
    assert assert_as_separate(checkpoint, batch, micro_batch_tokens=micro_batch_tokens) >= 1


@pytest.mark.parametrize("settings", [{"packing": False}, {"aux_loss_coefficient": 0.1}], ids=["padded", "balance"])
def test_nothing_is_shared_where_a_row_counts_for_itself(checkpoint, settings):
    *_, tree = step(checkpoint, make_tree_batch(TREES["group"]), **settings)
    assert tree["tree/compression"] == 1
