"""Sizes of the code stay within their bounds; `python -m tests.architecture.sizes` prints them all."""

from tests.architecture.sizes import sizes

OPEN = {
    "lines of the wheel",
    "parameters of a call",
    "lines of message_queue",
    "lines of the simulator",
    "test lines per product line",
}
"""Sizes that are still over their bound; a size that is within its bound leaves this set."""


def test_sizes_are_within_their_bounds():
    over = {
        size.name: f"{size.name}: {size.value:g}, at most {size.bound:g}" for size in sizes() if size.value > size.bound
    }
    assert not over.keys() - OPEN, "\n".join(over[name] for name in over.keys() - OPEN)
    assert not OPEN - over.keys(), f"within their bounds now: {sorted(OPEN - over.keys())}"
