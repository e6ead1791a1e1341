"""A trainer that has trained and is closed leaves no layers and no connections in its process."""

import gc
import weakref

import psutil

from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint
from tests.parallel.support import WARNINGS, make_batch, start_trainer

pytestmark = WARNINGS


def train_and_close(checkpoint):
    """Open files of the process while the trainer lives, and weak references to its layers."""
    trainer = start_trainer(checkpoint)
    trainer.train(make_batch((9, 7, 8), layers=1))
    opened = psutil.Process().num_fds()
    layers = [weakref.ref(layer) for chunk in trainer.model.chunks for layer in chunk.decoder.layers]
    trainer.close()
    return opened, layers


def test_a_closed_trainer_frees_its_layers_and_connections(tmp_path):
    config = qwen3_moe_config(num_hidden_layers=2, hidden_size=32, intermediate_size=32, moe_intermediate_size=16)
    checkpoint = save_checkpoint(config, tmp_path, seed=3)
    train_and_close(checkpoint)  # imports and caches of the first one stay
    gc.collect()
    before = psutil.Process().num_fds()
    opened, layers = train_and_close(checkpoint)
    gc.collect()
    assert [layer() for layer in layers] == [None, None]
    assert psutil.Process().num_fds() == before < opened
