"""Megatron's experts that are computed one after another, the reference of the grouped ones."""

from contextlib import contextmanager
from unittest import mock


@contextmanager
def loop_experts():
    """Models that are built in this block have them; experts with biases cannot be trained so."""
    from async_rl.trainer.model import layers  # imports megatron

    with mock.patch.object(layers, "SequentialMLP", object()):  # no spec has it, so none is replaced
        yield
