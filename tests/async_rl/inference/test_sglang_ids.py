"""Ids in flight are prefix-free, whatever comes and goes."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.engine import EngineError
from async_rl.inference.sglang.ids import PrefixFreeIds


@given(st.lists(st.text("ab.", min_size=1, max_size=5)))
def test_exactly_the_ids_without_a_prefix_relation_are_held(asked: list[str]):
    ids, held = PrefixFreeIds("r"), set[str]()
    with ExitStack() as stack:
        for request_id in asked:
            clash = any(request_id.startswith(other) or other.startswith(request_id) for other in held)
            if clash:
                with pytest.raises(EngineError, match="one is a prefix of the other"):
                    stack.enter_context(ids.held(request_id))
            else:
                stack.enter_context(ids.held(request_id))
                held.add(request_id)
    with ExitStack() as stack:
        for request_id in held:
            stack.enter_context(ids.held(request_id))


def test_an_id_may_come_again_when_it_has_landed():
    ids = PrefixFreeIds("r")
    for request_id in ("a", "ab", "a"):
        with ids.held(request_id):
            pass
