"""Parity of the trainer: a cell is a layout, a replay mode, a recomputation, a packing and a family, against one rank.

A cell makes one update. Between the passes at the start of its batch and the update its routers are moved, so that
routing of then (R2), of the rollout (R3) and of now (none) are three different things. `Difference` says how a cell is
compared with the same update on one rank, packed, with nothing recomputed.
"""

import contextlib
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from async_rl.trainer.critic.config import CriticConfig
from async_rl.trainer.distributed import open_store
from async_rl.trainer.loss.losses import DecoupledPPO
from tests.helpers import numerics, tiny_models
from tests.helpers.critics import GAMMA_LAM, head_gradients, set_head, trunk_gradients, valued_tokens
from tests.parallel.parity_cells import LAYOUTS, MODELS, Cell, ranks_of
from tests.parallel.processes import rank_processes
from tests.parallel.support import (
    NO_UPDATE,
    TREES,
    gradients,
    make_batch,
    make_tree_batch,
    padded_rank,
    training_batch_of,
)

# Forward and backward pass of 4 layers, each of about 12 operations in a row: projections, attention, norms, experts.
# A broken replay moves gradients by 2e-2 or more.
TOLERANCE = numerics.rounding(2 * 4 * 12)
LIMIT_S = 180.0  # of one cell; the first waits for the processes to start
LOSS = DecoupledPPO(clip_low=0.9, clip_high=9.0, entropy_coefficient=0.01)
MOVED_BY = 0.04  # standard deviation of the change of router weights (theirs is 0.1)
# Packed on one rank, with nothing recomputed and no shared prefixes.
ON_ONE_RANK = {
    field.name: field.default
    for field in fields(Cell)
    if field.name not in ("family", "layout", "replay", "support", "critic", "trees", "shares")
} | {"layout": "single", "shares": False}
# Makes the models well conditioned: with a residual stream that no layer changes much and router logits of about 1, a
# unit in the last place of every weight moves no gradient by more than the tolerance. It would by 1e-5 without.
GAINS = {
    "embed_tokens.weight": 10.0,
    "o_proj.weight": 0.05,
    "out_proj.weight": 0.05,
    "down_proj.weight": 0.05,
    "gate.weight": 0.2,
}
GAINS |= {"experts.down_proj": 0.05, "router.weight": 0.2}  # gpt-oss


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A cell against one rank: Euclidean norms of differences, relative to the result of one rank."""

    loss: float = float("inf")
    """|difference| / |loss|."""
    logprobs: float = float("inf")
    """Of the tokens in the loss, as one vector."""
    gradients: float = float("inf")
    """The largest of any weight tensor; each expert has separate tensors."""
    worst: str = ""
    """Hugging Face name of that tensor."""
    error: str = ""
    """The cause if there are no numbers; they are then infinite."""

    @property
    def largest(self) -> float:
        return max(self.loss, self.logprobs, self.gradients)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """|ours - theirs| / |theirs| in float64; infinite if only one is zero, or if ours is not finite."""
    difference = (ours.double() - theirs.double()).norm().item()
    norm = theirs.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / norm if norm and difference == difference else float("inf")


def compare(ours: dict, theirs: dict) -> Difference:
    """`ours` and `theirs`: loss, logprobs and gradients of `update`."""
    missing = ours["gradients"].keys() ^ theirs["gradients"].keys()
    if missing:
        return Difference(error=f"gradients of other weights: {sorted(missing)[:4]}")
    gradient = {n: relative(ours["gradients"][n], held) for n, held in theirs["gradients"].items()}
    worst = max(gradient, key=gradient.__getitem__)
    return Difference(
        loss=relative(*(torch.tensor(each["loss"], dtype=torch.float64) for each in (ours, theirs))),
        logprobs=relative(ours["logprobs"], theirs["logprobs"]),
        gradients=gradient[worst],
        worst=worst,
    )


# ---- one cell on this rank


def parity_batch(cell: Cell):
    """The batch of a cell: advantages of one sign more than the other, so that the loss is far from zero."""
    layers = 4 if cell.family == "gpt_oss" else 3
    if cell.trees:
        batch = make_tree_batch(TREES[cell.trees], support=cell.support, layers=layers, other_rows=[(3, 12), (1, 5)])
    else:
        batch = make_batch(support=cell.support, layers=layers)
    batch["advantages"] += 1.0
    return batch


def update(cell: Cell, checkpoint: Path, *, rank: int) -> dict:
    """Loss, logprobs of the tokens in the loss under the moved routers, gradients by Hugging Face name; collective."""
    from tests.parallel.broken_replay import FAULTS
    from tests.parallel.fused_layers import fused_layers

    if cell.critic:
        return critic_update(cell, checkpoint, rank=rank)

    class MovedRank(padded_rank()):
        """Moves its routers between the passes at the start of a batch and the update."""

        seen: Tensor

        def _forward_and_backward(self, micro_batches, objective, aux_loss_coefficient):
            move_routers(self.model.chunks)
            if cell.fault:
                FAULTS[cell.fault](self.model, micro_batches)
            found = self._forward_backward.logprobs(micro_batches)
            self.seen = self._forward_backward.of_update(micro_batches, found)
            super()._forward_and_backward(micro_batches, objective, aux_loss_coefficient)

    with fused_layers() if cell.layers == "fused" else contextlib.nullcontext():
        trainer = MovedRank(
            config=cell.config(),
            optimizer=NO_UPDATE,
            loss=LOSS,
            checkpoint=checkpoint,
            rank=rank,
            world_size=ranks_of(cell),
        )
    metrics = trainer.train(parity_batch(cell))
    assert (metrics["tree/compression"] > 1.05) == bool(cell.trees and cell.shares)
    return {"loss": metrics["loss"], "logprobs": trainer.seen, "gradients": gradients(trainer)}


def critic_update(cell: Cell, checkpoint: Path, *, rank: int) -> dict:
    """As `update` of the value model: its loss, values and returns, and its gradients; collective."""
    trainer = padded_rank()(
        config=cell.config(),
        optimizer=NO_UPDATE,
        loss=LOSS,
        checkpoint=checkpoint,
        rank=rank,
        world_size=ranks_of(cell),
        critic=CriticConfig(trunk=cell.critic, optimizer=NO_UPDATE),  # pyright: ignore[reportArgumentType]
    )
    set_head(trainer)
    batch = parity_batch(cell)
    batch["rewards"] = 1.0 + torch.arange(len(batch), dtype=torch.float64) % 3
    options = {"advantage": GAMMA_LAM, "truncated": [0, 2]}
    found = valued_tokens(trainer, training_batch_of(batch, **options))
    metrics = trainer.train(batch, **options)
    grads = trunk_gradients(trainer) | {f"head.{name}": grad for name, grad in head_gradients(trainer).items()}
    return {"loss": metrics["critic/loss"], "logprobs": torch.cat([found.values, found.returns]), "gradients": grads}


def move_routers(chunks) -> None:
    """Add the same noise to a router on whichever ranks it is."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is not None:
                noise = torch.Generator().manual_seed(layer.layer_number)
                weight = router.weight.data
                weight += MOVED_BY * torch.randn(weight.shape, generator=noise).to(weight)


# ---- ranks that stay up for many cells


def run_cells(cells: list[Cell], folder: Path) -> Iterator[tuple[Cell, Difference]]:
    """Each cell and its difference from one rank, in the order of completion, small layouts first.

    `folder` keeps checkpoints and references for another call. If a cell fails on any rank or hangs, all ranks are
    restarted for the cells after it.
    """
    make_references(cells, folder)
    for ranks in sorted({ranks_of(cell) for cell in cells}):
        todo = sorted((c for c in cells if ranks_of(c) == ranks), key=lambda c: list(LAYOUTS).index(c.layout))
        while todo:
            done = 0
            for cell, difference in _Ranks(ranks, todo, folder).results():
                yield cell, difference
                done += 1
            todo = todo[done:]


def make_references(cells: list[Cell], folder: Path) -> None:
    """Write the checkpoints and the results of one rank, this process, that `folder` lacks."""
    from async_rl.trainer.distributed import ProcessGroups

    absent = {c.reference: replace(c, **ON_ONE_RANK) for c in cells}
    absent = {name: cell for name, cell in absent.items() if not (folder / name).exists()}
    for name, cell in absent.items():
        if not (folder / cell.family).exists():
            make_checkpoint(cell.family, folder / cell.family)
        groups = ProcessGroups(cell.config(), rank=0, world_size=1, rendezvous=None)
        try:
            torch.save(update(cell, folder / cell.family, rank=0), folder / name)
        finally:
            groups.close()


def make_checkpoint(family: str, folder: Path) -> Path:
    """A tiny model whose weights are spread wide, then scaled by GAINS."""
    biased = family == "gpt_oss"  # ranks that add up their parts must not add a bias twice
    path = tiny_models.save_checkpoint(MODELS[family](), folder, seed=3, vectors=biased) / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        weight *= next((gain for end, gain in GAINS.items() if name.endswith(end)), 1.0)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


class _Ranks:
    """Processes that run `cells` one after the other until one fails."""

    def __init__(self, ranks: int, cells: list[Cell], folder: Path) -> None:
        context = rank_processes()
        self._cells = cells
        layouts = list(dict.fromkeys(c.layout for c in cells))
        self._stores = {layout: open_store("127.0.0.1") for layout in layouts}
        addresses = {name: f"{store.host}:{store.port}" for name, store in self._stores.items()}
        self._results, sending = context.Pipe(duplex=False)
        self._processes = [
            context.Process(target=_rank, args=(rank, ranks, cells, folder, addresses, sending), daemon=True)
            for rank in range(ranks)
        ]
        for process in self._processes:
            process.start()
        sending.close()

    def results(self) -> Iterator[tuple[Cell, Difference]]:
        """The difference of each cell, in order; the last one has an error if not all could be run."""
        patience_s = 0.0
        try:
            for cell in self._cells:
                difference = self._next()
                yield cell, difference
                if difference.error:
                    return
            patience_s = 10.0
        finally:
            self._stop(patience_s)

    def _next(self) -> Difference:
        if not self._results.poll(LIMIT_S):
            return Difference(error=f"no rank answered in {LIMIT_S} s")
        try:
            return self._results.recv()
        except EOFError:
            return Difference(error=f"the ranks ended: exit codes {[p.exitcode for p in self._processes]}")

    def _stop(self, patience_s: float) -> None:
        """After the last cell ranks end by themselves; after a failure they wait for one that is gone."""
        for process in self._processes:
            process.join(patience_s)
            if process.is_alive():
                process.kill()
                process.join()
        self._results.close()


def _rank(rank, ranks, cells, folder, addresses, sending):
    from async_rl.trainer.distributed import ProcessGroups

    warnings.simplefilter("ignore")
    groups, layout = None, None
    for cell in cells:
        try:
            if cell.layout != layout:
                if groups is not None:
                    groups.close()
                layout = cell.layout
                config = cell.config()
                groups = ProcessGroups(config, rank=rank, world_size=ranks, rendezvous=addresses[layout])
                torch.set_num_threads(numerics.THREADS)
            result = update(cell, folder / cell.family, rank=rank)
            if rank == 0:
                sending.send(compare(result, torch.load(folder / cell.reference, weights_only=False)))
        except BaseException:  # noqa: BLE001 - the table shows it
            # Short enough to be written at once: ranks share the pipe.
            sending.send(Difference(error=f"rank {rank}: {traceback.format_exc()[-2000:]}"))
            sys.exit(1)
    if groups is not None:
        groups.close()
