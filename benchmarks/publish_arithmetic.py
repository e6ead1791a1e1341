"""Seconds of a publish for large models: rates measured on this machine, combined with named assumptions.

The rates are those of the functions that a publish calls, on one thread: `write_bucket` of an owner,
`LocalStore.fetch` and `receive` of a node (gloo inside a process), `load_share` of an engine's worker, and the pauses
of an idle replica of vLLM. Versions are bfloat16 weights under Adam, as in benchmarks/delta.py; rates are medians over
versions. Everything that this machine does not have is an argument: copies between GPU and host and inside a GPU,
network, shared folder, layouts.

    python benchmarks/publish_arithmetic.py [--mb 256] [--versions 12] [--lr 1e-6] [--gpu-host-gbs 12.5]
        [--device-gbs 1300] [--network-gbs 50] [--folder-gbs 20] [--bytes-per-parameter 2]
        [--model NAME BILLIONS DENSE_BILLIONS STAGES TENSOR_RANKS EXPERT_RANKS TENSOR_PARALLEL REPLICAS NODES] ...
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.weights.broadcast import VersionServer
from async_rl.weights.checksum import value_sums
from async_rl.weights.digest import load_share, mapped
from async_rl.weights.overwrite import MappedFiles
from async_rl.weights.store import LocalStore
from async_rl.weights.transport import (
    MAX_DELTAS,
    Bases,
    Seat,
    Source,
    WeightUpdate,
    discard_updates,
    finish_update,
    update_files,
    version_folder,
    write_bucket,
)
from benchmarks.delta import adam_versions
from benchmarks.publish_files import timed
from benchmarks.support import markdown_table, say, show

HOST = "127.0.0.1"
Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, the layout of its trainer, and its replicas."""

    name: str
    """In the table."""
    billions: float
    """Parameters / 1e9."""
    dense_billions: float
    """Parameters / 1e9 outside of routed experts."""
    stages: int
    """Pipeline stages of the trainer."""
    tensor_ranks: int
    """Tensor-parallel ranks of a stage."""
    expert_ranks: int
    """Expert-parallel ranks of a stage."""
    tensor_parallel: int
    """Workers of a replica."""
    replicas: int
    """Replicas of the run."""
    nodes: int
    """Nodes on which the replicas run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured on this machine, in GB/s of complete weights."""

    write: float
    """An owner: digest and file of a complete bucket."""
    write_delta: float
    """An owner: digest, changes, file, and the new base."""
    fetch: float
    """A node: a complete version read, verified and written to shared memory."""
    fetch_delta: float
    """A node: a version made from changes, verified and written to shared memory."""
    receive: float
    """A node: a complete version received over gloo into shared memory, and verified."""
    read: float
    """A worker: its share of a version read from shared memory and verified."""
    delta_share: float
    """Bytes of the changes over those of the weights."""
    engine: float
    """A worker: the rest of a load by vLLM, in GB/s of the weights that it keeps."""
    exchange_s: float
    """Seconds of the pause of an idle replica for the exchange of a staged version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Assumed."""

    gpu_host_gbs: float
    """GB/s of a copy between a GPU and pageable host memory, in each direction."""
    device_gbs: float
    """GB/s of a copy inside a GPU."""
    network_gbs: float
    """GB/s that a node receives."""
    folder_gbs: float
    """GB/s of the shared folder, over all nodes."""
    bytes_per_parameter: float
    """2 for bfloat16."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Seconds of the parts of a publish of one model. Parts that the code does one after the other are added.

    Args:
        model: its size and layout.
        rates: of this machine.
        hardware: the assumptions.
    """

    model: Model
    rates: Rates
    hardware: Hardware

    # ---- gigabytes

    @property
    def total(self) -> float:
        """The weights."""
        return self.model.billions * self.hardware.bytes_per_parameter

    @property
    def owner(self) -> float:
        """What an owner writes: its turn of the dense tensors, and its experts. All owners write at the same time."""
        dense = self.model.dense_billions * self.hardware.bytes_per_parameter
        experts = self.total - dense
        return (dense / self.model.tensor_ranks + experts / self.model.expert_ranks) / self.model.stages

    @property
    def worker(self) -> float:
        """What a worker of a replica keeps; it verifies as much."""
        return self.total / self.model.tensor_parallel

    # ---- the trainer waits

    def stall_memory(self) -> float:
        """Owners write to the shared memory of their nodes: copy to the host, digest and file. Also of `broadcast`."""
        return self.owner / self.hardware.gpu_host_gbs + self.owner / self.rates.write

    def stall_folder(self) -> float:
        """As `stall_memory`, and the folder takes the files of all owners."""
        return self.stall_memory() + self.total / self.hardware.folder_gbs

    def stall_delta(self) -> float:
        """Copy to the host, digest and changes; the folder takes the changes of all owners."""
        files = self.rates.delta_share * self.total / self.hardware.folder_gbs
        return self.owner / self.hardware.gpu_host_gbs + self.owner / self.rates.write_delta + files

    def stall_single(self) -> float:
        """One rank has all weights: copy to the host, digest and one file in shared memory."""
        return self.total / self.hardware.gpu_host_gbs + self.total / self.rates.write

    # ---- a node brings a version; replicas serve

    def fetch_folder(self) -> float:
        """A node reads and verifies a complete version, and writes it to its shared memory."""
        return self._from_folder(self.total) + self.total / self.rates.fetch

    def fetch_delta(self) -> float:
        """A node reads the changes, and makes the version from them and the one before."""
        return self._from_folder(self.rates.delta_share * self.total) + self.total / self.rates.fetch_delta

    def receive_broadcast(self) -> float:
        """A node receives all weights into its shared memory and verifies them, while the trainer goes on."""
        return self.total / min(self.hardware.network_gbs, self.rates.receive)

    def _from_folder(self, gigabytes: float) -> float:
        """All nodes read at the same time; the folder or the network of a node is the limit."""
        return max(gigabytes / self.hardware.network_gbs, self.model.nodes * gigabytes / self.hardware.folder_gbs)

    # ---- a replica

    def load(self) -> float:
        """Each worker verifies its share of the buckets; the engine takes the worker's part of all of them.

        This is the pause with `at_once` and `rolling`. With `staged` the replica serves meanwhile.
        """
        return self.worker / self.rates.read + self.worker / min(self.rates.engine, self.hardware.gpu_host_gbs)

    def rolling(self, *, max_paused: int) -> float:
        """Loads of all replicas, `max_paused` at a time."""
        return math.ceil(self.model.replicas / max_paused) * self.load()

    def exchange(self) -> float:
        """Pause with `staged`: the measured constant, and a copy of the worker's weights inside its GPU."""
        return self.rates.exchange_s + self.worker / self.hardware.device_gbs


# Layouts of `scale=qwen3_30b_a3b_24` and `scale=qwen3_235b_a22b`; 1T is no preset.
MODELS = (
    Model(
        name="30B",
        billions=30.53,
        dense_billions=1.54,
        stages=1,
        tensor_ranks=2,
        expert_ranks=8,
        tensor_parallel=2,
        replicas=4,
        nodes=1,
    ),
    Model(
        name="235B",
        billions=235.1,
        dense_billions=8.0,
        stages=2,
        tensor_ranks=4,
        expert_ranks=32,
        tensor_parallel=8,
        replicas=4,
        nodes=4,
    ),
    Model(
        name="1T",
        billions=1000,
        dense_billions=12,
        stages=8,
        tensor_ranks=8,
        expert_ranks=32,
        tensor_parallel=8,
        replicas=16,
        nodes=16,
    ),
)


def seconds_table(publishes: Sequence[Publish], *, max_paused: int = 1) -> str:
    """The parts of a publish of each model."""
    parts = {
        "GB of weights": [p.total for p in publishes],
        "GB written by an owner": [p.owner for p in publishes],
        "GB on a worker of a replica": [p.worker for p in publishes],
        "trainer stall: `memory`, `broadcast`": [p.stall_memory() for p in publishes],
        "trainer stall: `folder`": [p.stall_folder() for p in publishes],
        "trainer stall: `folder`, `sync.delta`": [p.stall_delta() for p in publishes],
        "trainer stall: one owner, one file": [p.stall_single() for p in publishes],
        "before the pause, a node: `folder`": [p.fetch_folder() for p in publishes],
        "before the pause, a node: `folder`, `sync.delta`": [p.fetch_delta() for p in publishes],
        "before the pause, a node: `broadcast`": [p.receive_broadcast() for p in publishes],
        "before the pause, a replica: `staged`": [p.load() for p in publishes],
        "pause of a replica: `at_once`, `rolling`": [p.load() for p in publishes],
        "pause of a replica: `staged`": [p.exchange() for p in publishes],
        "all pauses of a publish: `rolling`": [p.rolling(max_paused=max_paused) for p in publishes],
    }
    rows = [[name, *(figure(value) for value in values)] for name, values in parts.items()]
    return markdown_table(["seconds", *(p.model.name for p in publishes)], rows)


def figure(value: float) -> str:
    """Two digits after the point below 1, one below 100, none above."""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def rates_table(rates: Rates) -> str:
    """The measured rates."""
    rows = [
        ["owner: digest and file", f"{rates.write:.2f} GB/s"],
        ["owner: digest, changes and new base", f"{rates.write_delta:.2f} GB/s"],
        ["node: fetch of a complete version", f"{rates.fetch:.2f} GB/s"],
        ["node: fetch of changes", f"{rates.fetch_delta:.2f} GB/s"],
        ["node: receive over gloo", f"{rates.receive:.2f} GB/s"],
        ["worker: read and verify its share", f"{rates.read:.2f} GB/s"],
        ["worker: rest of a load by vLLM", f"{rates.engine:.2f} GB/s"],
        ["changes over weights", f"{rates.delta_share:.2%}"],
        ["exchange of a staged version", f"{1000 * rates.exchange_s:.1f} ms"],
    ]
    return markdown_table(["measured", "rate"], rows)


def measure_rates(directory: Path, *, num_bytes: int, bucket_bytes: int, versions: int, lr: float) -> dict[str, float]:
    """Medians of all rates but those of the engine, by their names in `Rates`.

    Args:
        directory: in memory.
        num_bytes: of the weights.
        bucket_bytes: of a bucket, which has four tensors.
        versions: that are counted, less than `MAX_DELTAS`; two more come before them.
        lr: of Adam.

    Raises:
        ValueError: there are too many versions.
    """
    if versions >= MAX_DELTAS:
        raise ValueError(f"versions is {versions}; must be < {MAX_DELTAS}, or a version is complete")
    complete, changes = directory / "complete", directory / "changes"
    stores = [LocalStore(directory / name) for name in ("node-complete", "node-changes", "node-received")]
    server, updates = VersionServer(HOST, complete), dict[int, WeightUpdate]()
    bases, files, found = Bases(), MappedFiles(), list[tuple[float, ...]]()

    def write_complete(version: int, buckets: Sequence[Bucket]) -> None:
        discard_updates(complete, keep_version=version - 1, spare_for=version_folder(complete, version))
        updates[version] = write_version(complete, version=version, buckets=buckets, files=files)

    def load(version: int) -> None:
        files = update_files(stores[0].local(version_folder(complete, version)))
        load_share(mapped(files), list, sums=lambda t: [value_sums(t)], rank=0, ranks=1, ahead=len(files))

    def receive(version: int) -> None:
        update = updates[version]
        source = Source(server.address, tuple(range(len(update.buckets))))
        name = f"version {version}"
        seat = Seat(delivery=name, index=0, size=1, sources=(source,), backend="gloo", timeout_s=300.0)
        stores[2].receive(update, seat)

    for version, values in enumerate(adam_versions(num_bytes // 2, lr=lr, versions=versions + 1)):
        buckets = buckets_of(values, bucket_bytes=bucket_bytes)
        seconds = (
            timed(lambda v=version, b=buckets: write_complete(v, b)),
            timed(lambda v=version, b=buckets: write_version(changes, version=v, buckets=b, bases=bases)),
            timed(lambda v=version: stores[0].fetch(version_folder(complete, v))),
            timed(lambda v=version: stores[1].fetch(version_folder(changes, v))),
            timed(lambda v=version: receive(v)),
            timed(lambda v=version: load(v)),
        )
        num_changes = sum(file.stat().st_size for file in version_folder(changes, version).glob("*.delta"))
        discard_updates(changes, keep_version=version)
        say(f"version {version}: " + ", ".join(f"{second:.3f} s" for second in seconds))
        if version > 1:
            found.append((*seconds, num_changes))
    for store in stores:
        store.release()
    server.close()
    *times, num_changes = np.median(np.array(found), axis=0).tolist()
    names = ("write", "write_delta", "fetch", "fetch_delta", "receive", "read")
    total = 2 * (num_bytes // 2)
    return {name: total / 1e9 / second for name, second in zip(names, times, strict=True)} | {
        "delta_share": num_changes / total
    }


def buckets_of(values: Tensor, *, bucket_bytes: int) -> list[Bucket]:
    """Tensors of a version: views of its values, four in a bucket."""
    tensors = [(f"model.layers.{i:04}.weight", part) for i, part in enumerate(values.split(bucket_bytes // 4 // 2))]
    return [tensors[start : start + 4] for start in range(0, len(tensors), 4)]


def write_version(
    directory: Path,
    *,
    version: int,
    buckets: Sequence[Bucket],
    bases: Bases | None = None,
    files: MappedFiles | None = None,
) -> WeightUpdate:
    """Write a version as `async_rl.trainer.export.export_update` does on the only owner."""
    folder = version_folder(directory, version)
    digests = [write_bucket(folder, number, bucket, bases=bases, files=files) for number, bucket in enumerate(buckets)]
    base = None if bases is None else bases.base_of_next()
    if bases is not None:
        bases.published(version)
    return finish_update(folder, version=version, buckets=digests, base=base)


async def measure_engine(directory: Path, *, mb: int, publishes: int, reading: float) -> dict[str, float]:
    """`Rates.engine` and `Rates.exchange_s`, by these names, from pauses of an idle replica of vLLM with one worker.

    Args:
        directory: in memory.
        mb: megabytes of the model.
        publishes: in each mode.
        reading: seconds in which a worker reads and verifies a gigabyte.
    """
    from benchmarks import publish_pauses  # imports vLLM

    os.environ.update(publish_pauses.engine_environment(publish_pauses.CONFIG))
    pauses = await publish_pauses.measure_pauses(mb, directory=directory, publishes=publishes)
    gigabytes = pauses.num_bytes / 1e9
    rest = pauses.at_once.value - pauses.staged.value - gigabytes * reading
    return {"engine": gigabytes / rest, "exchange_s": pauses.staged.value}


def model_of(values: Sequence[str]) -> Model:
    """Model of the values of `--model`."""
    name, billions, dense_billions, stages, tensor_ranks, expert_ranks, tensor_parallel, replicas, nodes = values
    return Model(
        name=name,
        billions=float(billions),
        dense_billions=float(dense_billions),
        stages=int(stages),
        tensor_ranks=int(tensor_ranks),
        expert_ranks=int(expert_ranks),
        tensor_parallel=int(tensor_parallel),
        replicas=int(replicas),
        nodes=int(nodes),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256, help="of the weights that are written and read")
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--engine-mb", type=int, default=300, help="of the model of the replica")
    parser.add_argument("--publishes", type=int, default=6, help="of the replica, in each mode")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--gpu-host-gbs", type=float, default=12.5)
    parser.add_argument("--device-gbs", type=float, default=1300.0)
    parser.add_argument("--network-gbs", type=float, default=50.0)
    parser.add_argument("--folder-gbs", type=float, default=20.0)
    parser.add_argument("--bytes-per-parameter", type=float, default=2.0)
    parser.add_argument("--max-paused", type=int, default=1, help="sync.max_paused with rolling")
    parser.add_argument("--model", nargs=9, action="append", help="instead of 30B, 235B and 1T; see above")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        measured = measure_rates(
            Path(directory),
            num_bytes=args.mb * 1_000_000,
            bucket_bytes=args.bucket_mb << 20,
            versions=args.versions,
            lr=args.lr,
        )
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        reading = 1 / measured["read"]
        measured |= asyncio.run(
            measure_engine(Path(directory), mb=args.engine_mb, publishes=args.publishes, reading=reading)
        )
    rates = Rates(**measured)
    hardware = Hardware(
        gpu_host_gbs=args.gpu_host_gbs,
        device_gbs=args.device_gbs,
        network_gbs=args.network_gbs,
        folder_gbs=args.folder_gbs,
        bytes_per_parameter=args.bytes_per_parameter,
    )
    models = MODELS if args.model is None else [model_of(values) for values in args.model]
    show(rates_table(rates))
    show("\n" + seconds_table([Publish(model, rates, hardware) for model in models], max_paused=args.max_paused))


if __name__ == "__main__":
    main()
