"""Carries a checkpoint through a chain of layouts: each restores the state of the one before, and saves it."""

import os
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from async_rl.files.atomic_dir import partial_folder
from async_rl.trainer.model.model import ParallelConfig
from tests.helpers.killed_saves import kill_before_touch
from tests.parallel.processes import run_ranks, told
from tests.parallel.ranks import ADAM
from tests.parallel.support import exported, make_batch, make_supervised_batch, start_trainer

NEXT_SEEDS = (3, 4)


def restored(trainer, folder, again, layers, *, like):
    """The steps after a restore, and those after another restore of the state that this layout saved.

    The weights after the first restore are also saved as a Hugging Face checkpoint with the other files of `like`.
    """
    trainer.restore(folder)
    written = trainer.save(again)
    trainer.save_pretrained(pretrained_folder(again), like=like)  # collective too, next to the thread that writes
    written.result()
    first = next_steps(trainer, layers)
    trainer.restore(again)
    return {**first, "repeated": next_steps(trainer, layers)}


def pretrained_folder(folder):
    """The Hugging Face checkpoint of a link, next to its trainer checkpoint."""
    return folder.with_name(f"{folder.name}-pretrained")


def next_steps(trainer, layers):
    """Random numbers, metrics of the next updates and the weights after them."""
    draw = torch.rand(3)
    metrics = [trainer.train(make_batch(seed=seed, layers=layers)) for seed in NEXT_SEEDS]
    return {"draw": draw, "metrics": metrics, "weights": exported(trainer)}


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
        warnings.simplefilter("ignore")  # there is no process group on purpose
        load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


@dataclass(kw_only=True)
class Chain:
    """links: name -> settings of the trainer; each restores folder / name of the one before, the first folder / start.

    A link is of two ranks, unless its settings say `ranks`. settings: of every link. layers: MoE layers of the model.
    """

    checkpoint: Path
    folder: Path
    links: dict[str, dict]
    settings: dict = field(default_factory=dict)
    layers: int = 3

    def start(self):
        """One rank trains and saves; returns its next steps."""
        trainer = start_trainer(self.checkpoint, optimizer=ADAM, **self.settings)
        trainer.train(make_batch(seed=1, layers=self.layers))
        trainer.train_supervised(make_supervised_batch(seed=2))
        trainer.save(self.folder / "start").result()
        trainer.save_pretrained(pretrained_folder(self.folder / "start"), like=self.checkpoint)
        result = next_steps(trainer, self.layers)
        trainer.close()
        return result

    def end(self, name, **changes):
        """One rank restores the state of the last link and saves it as `name`; returns its next steps."""
        trainer = start_trainer(self.checkpoint, optimizer=ADAM, **{**self.settings, **changes})
        result = restored(
            trainer, self.folder / list(self.links)[-1], self.folder / name, self.layers, like=self.checkpoint
        )
        trainer.close()
        return result


def run_chains(chains):
    """Every link of every chain, in processes that take part in those that have their rank.

    At last rank 1 is killed while the ranks save over folder / killed of the first chain, a copy of folder / start.
    """
    shutil.copytree(chains[0].folder / "start", chains[0].folder / "killed")
    most = max(changes.get("ranks", 2) for chain in chains for changes in chain.links.values())
    meetings = [chain.folder / name for chain in chains for name in chain.links]
    run_ranks(_rank, chains, meetings=[*meetings, "killed"], ranks=most)


def _rank(rank, addresses, chains):
    warnings.simplefilter("ignore")
    for chain in chains:
        before = chain.folder / "start"
        for name, changes in chain.links.items():
            folder = chain.folder / name
            if rank < changes.get("ranks", 2):
                with told(chain.folder, name, rank=rank):
                    settings = {"ranks": 2, **chain.settings, **changes, "rank": rank, "rendezvous": addresses[folder]}
                    trainer = start_trainer(chain.checkpoint, optimizer=ADAM, **settings)
                    result = restored(trainer, before, folder, chain.layers, like=chain.checkpoint)
                    trainer.close()
                    if rank == 0:
                        torch.save(result, chain.folder / f"{name}.pt")
            before = folder
    if rank < 2:
        _save_until_killed(chains[0], rank=rank, ranks=2, rendezvous=addresses["killed"])


def _save_until_killed(chain, *, rank, **settings):
    """Rank 1 is killed when it opens the file of its tensors; the other writes its error down."""
    folder = chain.folder / "killed"
    trainer = start_trainer(
        chain.checkpoint, optimizer=ADAM, rank=rank, **settings, **chain.settings, parallel=ParallelConfig(tensor=2)
    )
    trainer.restore(folder)
    trainer.train(make_batch(seed=3, layers=chain.layers))
    if rank == 1:
        kill_before_touch(0, partial_folder(folder) / "__1_0.distcp")
    try:
        trainer.save(folder).result()
    except Exception as error:  # noqa: BLE001 - gloo has no special class for it
        (chain.folder / "told").write_text(str(error))
    os._exit(0)  # a group without one of its ranks cannot be closed
