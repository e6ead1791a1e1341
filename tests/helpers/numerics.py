"""Bounds of numeric comparisons, from a float64 reference or from the format; never from one machine's rounding.

A bound is derived in one of two ways:

- From a reference. transformers computes the same thing twice from the same weights, in float32 and in float64. The
  difference is the rounding error that float32 has on this input, with the conditioning of this model. Another float32
  implementation sums in another order: its error is of the same size, but not the same. It may be FACTOR times as far
  from float64, and two results may be 2 * FACTOR times as far from each other.
- From the format. A result of n roundings in a row, each of at most half a unit in the last place, is off by about
  sqrt(n) half units (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019); `rounding(n)`.

FACTOR does not depend on a machine. A sum of n terms is off by 0.5 to 1 times sqrt(n) half units if it is added up term
after term, and by less if it is added up in blocks, as kernels with wider registers or more threads do; the
maximum over some hundred values of one size varies by a factor of about 2. Defects are far larger: one wrong row of
routing changes some logprob by 4e-2 and some gradient by 1e-2 of its size; the bounds are below 3e-3 and below 1e-3.
"""

import contextlib
import copy
import math
import os
from collections.abc import Generator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

EPSILON = torch.finfo(torch.float32).eps  # the distance of 1.0 to the next number
FACTOR = 8.0
# CPU threads of trainers and engines in tests, whose own settings decide, not OMP_NUM_THREADS; and of references, which
# take ten times as long with more threads than idle cores.
THREADS = int(os.environ.get("TEST_THREADS", "1"))
DEVICE: Any = os.environ.get("TEST_DEVICE", "cpu")  # of engines under test; references are always computed on the CPU
torch.set_num_threads(THREADS)


def rounding(operations: float) -> float:
    """Relative error of a float32 result after `operations` roundings in a row, times FACTOR."""
    return FACTOR * EPSILON / 2 * math.sqrt(operations)


def error(single: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest |difference| of float32 values to float64 ones; at least the error of storing the largest in float32."""
    exact = exact.double()
    difference = (single.double() - exact).abs().max().item()
    return max(difference, EPSILON / 2 * exact.abs().max().item())


def assert_within(difference: float, bound: float, name: str = "difference") -> None:
    """A difference is within its bound; not a number never is."""
    assert difference <= bound, f"{name} is {difference:.3e}, {difference / bound:.2f} times its bound of {bound:.3e}"


def float64_model(model: Any) -> Any:
    """A copy of a transformers model with its weights in float64; call it inside `float64_forward`."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # grouped matmuls take no float64
    return exact


@contextlib.contextmanager
def float64_forward() -> Generator[None]:
    """Transformers computes norms, rotations, attention and routers in float32 for every model; not inside."""
    with _NoFloat32():
        yield


class _NoFloat32(TorchFunctionMode):
    """Replaces every float32 that is asked for by float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)
