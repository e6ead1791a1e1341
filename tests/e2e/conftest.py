"""The checkpoint of the trainer tests, and the process group of their trainers."""

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    from tests.parallel.support import save_tiny_moe

    return save_tiny_moe(tmp_path_factory.mktemp("tiny-moe") / "model")


@pytest.fixture(scope="module")
def owner(checkpoint):
    """A trainer that owns the process group of the trainers of a module."""
    from tests.parallel.support import start_trainer

    owner = start_trainer(checkpoint)
    yield owner
    owner.close()
