"""A trainer that saves over a checkpoint and is killed before a touch of the disk; run as a module.

    python -m tests.e2e.killed_trainer MODEL DIRECTORY NUMBER [NUMBER ...]

Each NUMBER is a separate process, forked after the imports. It restores DIRECTORY/NUMBER/state, makes a step, saves
to the same place, and is killed at the touch of the place with that number.
"""

import os
import sys
import warnings
from pathlib import Path

from tests.helpers.killed_saves import kill_before_touch


def save_over(model, state, number):
    from tests.parallel.support import make_batch, start_trainer

    trainer = start_trainer(model, optimizer=ADAM)
    trainer.restore(state)
    trainer.train(make_batch(seed=2))
    kill_before_touch(number, state.parent)
    trainer.save(state).result()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    import async_rl.trainer.rank  # noqa: F401 - once for all
    from tests.parallel.ranks import ADAM

    model, directory, *numbers = sys.argv[1:]
    for given in numbers:
        child = os.fork()
        if child == 0:
            save_over(Path(model), Path(directory) / given / "state", int(given))
            os._exit(0)
        os.waitpid(child, 0)
