"""A trajectory in several sequences weighs in the loss what it weighs in one."""

import pytest
import torch
from tensordict import TensorDict

from async_rl.trainer.loss.losses import DecoupledPPO
from tests.parallel.support import (
    assert_equal_steps,
    gradients,
    load_reference,
    make_batch,
    policy_terms,
    reference_step,
    save_tiny_moe,
    start_trainer,
)

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]


def in_two(batch):
    """Every sequence twice over the same rows, each time with half of its tokens in the loss."""
    mask = batch["loss_mask"]
    so_far = mask.cumsum(1)
    first = mask & (so_far <= so_far[:, -1:] // 2)
    made = TensorDict({name: torch.cat([v, v]) for name, v in batch.items()}, batch_size=[2 * len(batch)])
    made["loss_mask"] = torch.cat([first, mask & ~first])
    made["trajectory"] = torch.arange(len(batch)).repeat(2)
    return made


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_split_trajectory_gives_the_loss_and_gradient_of_the_whole(tmp_path, aggregation):
    checkpoint = save_tiny_moe(tmp_path / "model")
    whole, split = (start_trainer(checkpoint, loss=DecoupledPPO(aggregation=aggregation)) for _ in range(2))
    batch = make_batch()
    expected, found = whole.train(batch), split.train(in_two(batch))
    reference = reference_step(load_reference(checkpoint), batch, policy_terms(DecoupledPPO(aggregation=aggregation)))
    assert_equal_steps(expected["loss"], gradients(whole), reference)
    assert_equal_steps(found["loss"], gradients(split), reference)
    assert found["tokens"] == expected["tokens"]
    whole.close()
