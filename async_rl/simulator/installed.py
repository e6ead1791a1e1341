"""What a simulated run replaces in the modules of the real one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

from agent_loop.programs.endpoint import server
from agent_loop.programs.program import ProgramLoop
from async_rl.cluster import build_worker
from async_rl.cluster import queue as queue_process
from async_rl.controller import recovery as controller_recovery
from async_rl.rollout import dispatcher, worker
from async_rl.rollout.content import writer
from async_rl.simulator import model
from async_rl.simulator.agents import Endpoint, WatchedLoop, WatchedRouter
from async_rl.simulator.disk import connect, pwritev
from message_queue import sqlite_file

if TYPE_CHECKING:
    from async_rl.simulator.world import World


@contextmanager
def installed(world: World) -> Generator[None]:
    """Within it, connections and writes are those of the world's disk, and workers use the simulated model."""
    disk = world.disk
    replaced: list[tuple[ModuleType, str, object]] = [
        (sqlite_file, "sqlite3", _changed(sqlite3, connect=partial(connect, disk))),
        (writer, "os", _changed(os, pwritev=partial(pwritev, disk))),
        (writer, "FILE_BYTES", world.scenario.file_bytes),
        (controller_recovery, "read_content", world.read_content),
        (dispatcher, "read_stored", world.read_stored),
        (queue_process, "open_queue", world.open_queue),
        (worker, "ContentWriter", SimpleNamespace(open=world.open_writer)),
        (build_worker, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _path: model.SimulatedTokenizer())),
        (build_worker, "read_model_info", lambda _path: SimpleNamespace(routing=model.ROUTING, family="simulated")),
        (build_worker, "ReplicaRouter", partial(WatchedRouter, world)),
        (build_worker, "turn_reader", lambda _tokenizer, family: model.read_turn),
        (build_worker, "ProgramLoop", lambda **options: WatchedLoop(ProgramLoop(**options), world)),
        (server, "serve", partial(Endpoint, world)),
    ]
    with ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def _changed(module: ModuleType, **functions: object) -> SimpleNamespace:
    """A module with some functions replaced."""
    return SimpleNamespace(**(vars(module) | functions))
