"""Ids in flight are prefix-free."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.inference.sglang.ids import PrefixFreeIds
from message_queue.errors import EngineError


@given(st.lists(st.text("ab.", min_size=1, max_size=5)))
def test_prefix_free_ids_hold_exactly_the_ids_without_a_clash(asked):
    ids, held = PrefixFreeIds("r"), set[str]()
    with ExitStack() as stack:
        for request_id in asked:
            clash = any(request_id.startswith(other) or other.startswith(request_id) for other in held)
            if clash:
                with pytest.raises(EngineError, match="prefix"):
                    stack.enter_context(ids.reserve(request_id))
            else:
                stack.enter_context(ids.reserve(request_id))
                held.add(request_id)
    for request_id in asked:  # all were released
        with ids.reserve(request_id):
            pass
