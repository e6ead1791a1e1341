"""A trainer that has trained and is closed leaves nothing in the process."""

import gc
import weakref

import psutil
import pytest

from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint
from tests.parallel.support import make_batch, start_trainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = qwen3_moe_config(num_hidden_layers=2, hidden_size=32, intermediate_size=32, moe_intermediate_size=16)
    return save_checkpoint(config, tmp_path_factory.mktemp("close") / "model", seed=3)


def train_and_close(checkpoint):
    """Open files of the process while the trainer lives, and weak references to its layers."""
    trainer = start_trainer(checkpoint)
    trainer.train(make_batch((9, 7, 8), layers=1))
    opened = psutil.Process().num_fds()
    layers = [weakref.ref(layer) for chunk in trainer.model.chunks for layer in chunk.decoder.layers]
    trainer.close()
    return opened, layers


def test_its_layers_are_freed_and_its_connections_are_closed(checkpoint):
    train_and_close(checkpoint)  # what the first one brings into the process stays: imports, caches
    gc.collect()
    before = psutil.Process().num_fds()
    opened, layers = train_and_close(checkpoint)
    gc.collect()
    assert [layer() for layer in layers] == [None, None]
    assert psutil.Process().num_fds() == before < opened


def test_a_trainer_keeps_no_graph_between_its_steps(checkpoint):
    """So that one that is dropped without being closed is freed, too."""
    owner, trainer = start_trainer(checkpoint), start_trainer(checkpoint)
    try:
        trainer.train(make_batch((9, 7, 8), layers=1))
        layer = weakref.ref(trainer.model.chunks[0].decoder.layers[1])
        del trainer
        gc.collect()
        assert layer() is None
    finally:
        owner.close()
