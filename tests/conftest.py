"""What all tests share: examples of hypothesis have no deadline, as the machines that run them are shared.

Where several processes run the tests (`make test`), those of a file stay together, as they share what they start. Tests
on the servers of the conformance suite stay together too.

Asynchronous tests with the mark `virtual_time` run on a clock that jumps, so that a short time-out cannot end because
the machine is busy.
"""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import settings

from async_rl.simulator.virtual_time import VirtualTimeLoop

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

SERVERS = {"engine", "sglang_server", "server", "replicas"}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        shares_server = SERVERS & set(getattr(item, "fixturenames", ()))
        item.add_marker(pytest.mark.xdist_group("servers" if shares_server else item.path.stem))


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"loop": VirtualTimeLoop if item.get_closest_marker("virtual_time") else asyncio.new_event_loop}
