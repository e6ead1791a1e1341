"""The parity table on CUDA, over NCCL: in float32 as on the CPU, in bfloat16 against what that costs one GPU alone.

A layout in bfloat16 is compared with one GPU in float32, as one GPU in bfloat16 is. The first must not be much further
off than the second: layouts change the order of sums, not their precision.
"""

import pytest
import torch

from tests.parallel.parity import run_cells
from tests.parallel.parity_cells import LAYOUTS, Cell

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.timeout(900),
]

FLOAT32_TOLERANCE = 1e-5  # kernels are chosen by shape, and sum in other orders
BFLOAT16_RATIO = 2.0
BFLOAT16_ROUNDOFF = 2.0**-8  # the loss is one number, and may be close by luck on one GPU
CELLS = [
    Cell(family=family, layout=layout, replay=replay, recompute=recompute, packing=packing, dtype=dtype)
    for layout in LAYOUTS
    for family in ("qwen3_moe", "deepseek_v3")
    for replay, recompute, packing in (("R3", "full", "packed"), ("R2", "none", "padded"))
    # The live routers of R2 choose other experts in another precision, which is not what is compared here.
    for dtype in (("float32", "bfloat16") if replay == "R3" else ("float32",))
]


def runnable(cell):
    return LAYOUTS[cell.layout].ranks <= torch.cuda.device_count()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    cells = [cell for cell in CELLS if runnable(cell)]
    return {cell.name: found for cell, found in run_cells(cells, tmp_path_factory.mktemp("parity"))}


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: c.name)
def test_a_layout_is_within_rounding_of_one_gpu(cell, results):
    if not runnable(cell):
        pytest.skip(f"{cell.layout} needs {LAYOUTS[cell.layout].ranks} GPUs")
    found = results[cell.name]
    assert not found.error, found.error
    if cell.dtype == "float32":
        assert found.largest <= FLOAT32_TOLERANCE, found
        return
    alone = results[cell.on_one_rank.name]
    for name in ("loss", "logprobs", "gradients"):
        assert getattr(found, name) <= BFLOAT16_RATIO * max(getattr(alone, name), BFLOAT16_ROUNDOFF), (
            name,
            found,
            alone,
        )
