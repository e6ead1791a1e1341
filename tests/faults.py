"""Ways in which an engine's answer can break the contract, as the fakes take them."""

from async_rl.simulate.bad_answers import BAD_ANSWERS as FAULTS
from async_rl.simulate.bad_answers import on_last, on_rows

__all__ = ["FAULTS", "on_last", "on_rows"]
