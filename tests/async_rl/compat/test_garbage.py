import contextlib
import gc
import sys
from types import SimpleNamespace

import pytest

from async_rl.compat.garbage import make_collections_rare, no_collections, stay_frozen
from async_rl.inference.vllm.plugin import run_engine


@pytest.fixture(autouse=True)
def collections():
    """Generation -> number of collections so far; afterwards the collector is as before."""
    counts = dict.fromkeys(range(3), 0)

    def count(phase, info):
        counts[info["generation"]] += phase == "stop"

    thresholds = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(count)
    yield counts
    gc.callbacks.remove(count)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.parametrize("error", [None, ValueError])
def test_no_collections_leaves_out_the_objects_that_it_saw(collections, error):
    made = []
    with contextlib.suppress(ValueError), no_collections():
        made += [[number] for number in range(300_000)]
        if error is not None:
            raise error
    assert collections == {0: 0, 1: 0, 2: 0}
    assert gc.isenabled() and gc.get_freeze_count() > len(made)
    later = [[number] for number in range(3_000)]
    assert collections[0] > 0
    visited = gc.get_objects()
    assert len(later) <= len(visited) < len(made)


def test_make_collections_rare_starts_no_full_collection_as_a_heap_grows(collections):
    make_collections_rare()
    grown = [[number] for number in range(300_000)]
    assert grown and collections[0] > collections[1] > 0 == collections[2]


def test_stay_frozen_ignores_an_unfreeze(monkeypatch):
    monkeypatch.setattr(gc, "unfreeze", gc.unfreeze)
    gc.freeze()
    stay_frozen()
    gc.unfreeze()
    assert gc.get_freeze_count() > 0


def test_an_engine_process_stays_frozen_when_vllm_stops_it(monkeypatch):
    frozen = []

    def run_engine_core():
        gc.unfreeze()
        frozen.append(gc.get_freeze_count())

    engine = SimpleNamespace(EngineCoreProc=SimpleNamespace(run_engine_core=run_engine_core))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", engine)
    monkeypatch.setattr(gc, "unfreeze", gc.unfreeze)
    run_engine()
    assert frozen[0] > 0
