"""A trainer that has trained and is closed leaves no layers and no connections in its process."""

import gc
import multiprocessing
import weakref
from concurrent.futures import ProcessPoolExecutor

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


def trained_twice(checkpoint):
    """Open files before, during and after the second trainer of this process, and how many of its layers are left."""
    train_and_close(checkpoint)  # imports and caches of the first one stay
    gc.collect()
    before = psutil.Process().num_fds()
    opened, layers = train_and_close(checkpoint)
    gc.collect()
    return before, opened, psutil.Process().num_fds(), sum(layer() is not None for layer in layers)


def test_a_closed_trainer_frees_its_layers_and_connections(tmp_path):
    config = qwen3_moe_config(num_hidden_layers=2, hidden_size=32, intermediate_size=32, moe_intermediate_size=16)
    checkpoint = save_checkpoint(config, tmp_path, seed=3)
    # A process of its own, because connections of earlier tests may open and close meanwhile.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        before, opened, after, layers = process.submit(trained_twice, checkpoint).result()
    assert layers == 0
    assert after == before < opened
