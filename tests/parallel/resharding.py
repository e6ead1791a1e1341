"""Carries a checkpoint through a chain of layouts: each restores what the one before saved, and saves it again."""

import multiprocessing
import os
import sys
import traceback
import warnings

import torch

from async_rl.train.distributed import open_store
from tests.parallel.ranks import ADAM, LIMIT_S
from tests.parallel.support import make_batch, make_supervised_batch, start_trainer

NEXT_SEEDS = (3, 4)


def begin(checkpoint, folder, *, layers=3, **settings):
    """One rank trains and saves `folder`; what it gives when it goes on."""
    trainer = start_trainer(checkpoint, optimizer=ADAM, **settings)
    trainer.train(make_batch(seed=1, layers=layers))
    trainer.train_supervised(make_supervised_batch(seed=2))
    trainer.save(folder)
    result = next_steps(trainer, layers)
    trainer.close()
    return result


def restore_here(checkpoint, folder, again, *, layers=3, **settings):
    """Restore `folder` on one rank and save it as `again`; what it gives when it goes on."""
    trainer = start_trainer(checkpoint, optimizer=ADAM, **settings)
    result = restored(trainer, folder, again, layers)
    trainer.close()
    return result


def restored(trainer, folder, again, layers):
    """The steps after a restore, and those after another restore of what was saved in this layout."""
    trainer.restore(folder)
    trainer.save(again)
    first = next_steps(trainer, layers)
    trainer.restore(again)
    return {**first, "repeated": next_steps(trainer, layers)}


def next_steps(trainer, layers):
    """Metrics of the next updates and the weights after them."""
    from async_rl.train.convert import export_weights

    metrics = [trainer.train(make_batch(seed=seed, layers=layers)) for seed in NEXT_SEEDS]
    return {"metrics": metrics, "weights": dict(export_weights(trainer.model.chunks, shape=trainer.model.shape))}


def whole_tensors(folder):
    """Every tensor of a trainer checkpoint, by name."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    held = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in held.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is meant
        load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def run_chain(checkpoint, first, links, folder, *, ranks, layers=3):
    """Name of a link -> result of rank 0 or the traceback of a rank; its checkpoint is folder / name.

    links: name -> settings of the trainer. first: checkpoint that the first of them restores.
    """
    context = multiprocessing.get_context("spawn")
    stores = [open_store("127.0.0.1") for _ in links]
    addresses = [f"{store.host}:{store.port}" for store in stores]
    arguments = (ranks, checkpoint, first, links, addresses, folder, layers)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
    return {name: _result(folder, name) for name in links}


def _result(folder, name):
    failures = sorted(folder.glob(f"{name}.*.error"))
    if failures:
        return failures[0].read_text()
    path = folder / f"{name}.pt"
    return torch.load(path, weights_only=False) if path.exists() else "the ranks ended before this link"


def _rank(rank, ranks, checkpoint, before, links, addresses, folder, layers):
    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    for (name, settings), address in zip(links.items(), addresses, strict=True):
        try:
            trainer = start_trainer(checkpoint, optimizer=ADAM, rank=rank, rendezvous=address, ranks=ranks, **settings)
            result = restored(trainer, before, folder / name, layers)
            trainer.close()
            if rank == 0:
                torch.save(result, folder / f"{name}.pt")
            before = folder / name
        except BaseException:  # noqa: BLE001 - whatever it is, the test shows it
            (folder / f"{name}.{rank}.error").write_text(traceback.format_exc())
            sys.exit(1)  # the other rank waits in a collective and fails when this one is gone
