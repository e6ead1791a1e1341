"""Methods added to vLLM's worker: load a published version between two engine steps or during them, and pin routing.

A load also returns sums of the values of the model's parameters. They prove that these hold the published tensors.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from async_rl.weights.checksum import PACKED, Content, model_contents, sums_for
from async_rl.weights.digest import WeightsDigest, load_share, mapped, on_this_node, read_tensors
from async_rl.weights.group import received
from async_rl.weights.live import PACKED_SUFFIX
from async_rl.weights.transport import update_files
from async_rl.weights.twin import Staging, Twin

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger(__name__)
Report: TypeAlias = dict[str, Any]
"""Fields of `async_rl.inference.loads.RankLoad` as JSON."""


class LoadsUpdates:
    """Mixin for vLLM's worker class (`worker_extension_cls`); `collective_rpc` calls its methods on every rank.

    `self` is the worker, whose other methods vLLM and `async_rl.compat.vllm` define.
    """

    def outcome(self, method: str, *args: Any) -> tuple[Any, str]:
        """Result of a method and "", or None and the error.

        If one rank raised, vLLM would take the answers of later ranks for those of the next call.
        """
        try:
            return getattr(self, method)(*args), ""
        except Exception as error:  # noqa: BLE001 - `call_ranks` raises it
            _log.exception("%s failed", method)
            return None, f"{type(error).__name__}: {error}"

    def load_update(self: Any, version: str) -> Report:
        """Load all tensors of a published version. version: see `async_rl.weights.transport.readable_by_ranks`.

        The call runs between two engine steps, so no forward pass uses a partly loaded version.
        """
        from async_rl.compat.vllm_reload import pack_tied_head, placed_again, reloadable  # imports vLLM

        model = self.get_model()
        with placed_again(model):
            report = _load(
                version, lambda tensors: self.reload_weights(weights_iterator=reloadable(model, tensors)), model=model
            )
        pack_tied_head(model, self.vllm_config)
        return report | {"parameters": _contents(model)}

    def start_staging(self: Any, version: str) -> None:
        """Start to load a published version into a twin of the model, in a thread; see `load_update`."""
        if not hasattr(self, "staging"):
            self.staging = Staging[Report]()
        self.staging.start(self.get_model(), partial(_load_twin, version=version, config=self.vllm_config))

    def staged(self: Any) -> Report | None:
        """Report of the load of `start_staging`; None until it has ended.

        Raises:
            Exception: the version cannot be read whole; the model is unchanged.
        """
        return self.staging.result()

    def commit_staged(self: Any) -> None:
        """Exchange the weights between two engine steps."""
        self.staging.commit()

    def first_load(self: Any, files: list[str]) -> Report:
        """Fields `published`, `hashes` and `parameters` of the load at the start. files: of the checkpoint.

        A rank reads and hashes its share of the tensors.
        """
        model, share = self.get_model(), _place()
        sums, digest, published = sums_for(model), WeightsDigest(), dict[str, Any]()
        tensors = (named for file in files for named in read_tensors(Path(file)))
        for name, tensor in islice(tensors, share["rank"], None, share["ranks"]):
            digest.update(name, tensor)
            published[name] = sums(tensor)
        return {"published": published, "hashes": digest.hashes, "parameters": _contents(model)}

    def pin_routing(self: Any, rows: dict[str, dict[str, Any]]) -> None:
        """Use the recorded experts of running requests if their K/V has to be recomputed.

        Args:
            rows: `async_rl.inference.vllm.segment.encode_rows` of each request, by its id in the engine.
        """
        self.model_runner.pin_routing(rows)


def _load(
    version: str, load: Callable[[Iterator[tuple[str, torch.Tensor]]], object], *, model: torch.nn.Module
) -> Report:
    """Report without parameters of a load of a published version. model: model that is loaded."""
    share, sums = _place(), sums_for(model)
    if not version.startswith("{"):
        files = update_files(on_this_node(Path(version)))
        return load_share(mapped(files), load, sums=sums, ahead=len(files), **share)
    device = next(model.parameters()).device
    with contextlib.closing(received(json.loads(version), device=device, **share)) as buckets:
        return load_share(buckets, load, sums=sums, **share)


def _place() -> dict[str, int]:
    """Rank of this process in its engine, and number of ranks."""
    return {"rank": torch.distributed.get_rank(), "ranks": torch.distributed.get_world_size()}


def _load_twin(twin: Twin, *, version: str, config: VllmConfig) -> Report:
    """Load a published version into a twin, while the model decodes."""
    from async_rl.compat.vllm_reload import reload_twin  # imports vLLM

    report = _load(version, lambda tensors: reload_twin(twin, tensors, config=config), model=twin.model)
    return report | {"parameters": _contents(twin.model)}


def _contents(model: torch.nn.Module) -> dict[str, Content]:
    packed = [(name, getattr(module, PACKED, None)) for name, module in model.named_modules()]
    return {
        **model_contents(model),
        **{f"{name}.weight{PACKED_SUFFIX}": noted for name, noted in packed if noted is not None},
    }
