"""What all tests share: lanes, groups and clocks.

- Lanes: `make test` runs n cases of a test with the mark `drawn(n)`, and n of all cases with the mark
  `drawn(n, of="whole run")`. The commit chooses them. The others get the mark `nightly`; `make test-all` runs all.
- Groups: where several processes run the tests, those of a file stay in one, as they share what they start. Tests on
  the servers of the conformance suite stay together by engine; those on a fake are grouped by file.
- Clocks: tests with the mark `virtual_time` run on a clock that jumps, so that a short time-out cannot end because the
  machine is busy. Examples of hypothesis have no deadline, as the machines that run them are shared.
- Signals: an interrupt reaches the tests and the processes that they start, also if the shell that started pytest in
  the background ignores interrupts.
"""

import asyncio
import random
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from async_rl.simulator.virtual_time import VirtualTimeLoop

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SERVERS = {"engine": "vllm", "sglang_server": "sglang"}
"""Fixture -> engine that it starts."""
DRAWN = {"sglang": 40}
"""Group -> tests that `make test` draws from the group. SGLang's take three times as long as vLLM's."""


def commit() -> str:
    """The commit that is tested; empty outside of a repository."""
    head = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()


def group_of(item: pytest.Item) -> str:
    """Tests that run in one process; `vllm` for one with the parameter server=vllm-tp2."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    served = str(params.get("server") or params.get("found") or "")
    fixtures = [engine for fixture, engine in SERVERS.items() if fixture in getattr(item, "fixturenames", ())]
    engines = [engine for engine in SERVERS.values() if served.startswith(engine)] if served else fixtures
    return "+".join(engines) or item.path.stem


def draw(items: list[pytest.Item], *, seed: str) -> None:
    """Mark the cases that `make test` leaves out, of the tests with the mark `drawn`."""
    drawn: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("drawn"):
            drawn[mark.kwargs.get("of") or item.nodeid.partition("[")[0], *mark.args].append(item)
    for (name, number), cases in drawn.items():
        cases = [case for case in cases if not case.get_closest_marker("nightly")]
        kept = random.Random(f"{seed} {name}").sample(cases, min(number, len(cases)))
        for item in cases:
            if item not in kept:
                item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups, and before the lanes are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = group_of(item)
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))
        if group in DRAWN and not item.get_closest_marker("drawn"):
            item.add_marker(pytest.mark.drawn(DRAWN[group], of=group))
    draw(items, seed=commit())


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"loop": VirtualTimeLoop if item.get_closest_marker("virtual_time") else asyncio.new_event_loop}
