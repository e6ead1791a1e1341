"""An engine that reads a version whole and serves something else is found at that load."""

from functools import partial

import pytest
import pytest_asyncio
import torch

from async_rl.config.schema import FLOAT32_MAX_K3
from async_rl.controller.probe import MismatchError
from message_queue.errors import EngineError
from tests.conformance import served
from tests.conformance.engines import MARKS, WITH_KV
from tests.conformance.planted import PARTLY_WRONG, TRADED
from tests.conformance.scored import ScoresOfTruth, probe_of
from tests.helpers.updates import read_update, write_update

pytestmark = [*MARKS, WITH_KV]


@pytest_asyncio.fixture(loop_scope="package")
async def plant(tested, sglang_plugins):
    """Plants a fault into later loads of an engine that serves version 0, loaded after version 1."""
    for version in (1, 0):
        await tested.publish(version=version)
    plant = partial(served.plant, tested, sglang_plugins)
    yield plant
    await plant("")


@pytest.mark.parametrize("staged", [False, True], ids=["at_once", "staged"])
@pytest.mark.parametrize("fault", ["none", "half", "stale"])
async def test_a_load_that_changed_no_parameters_is_refused(tested, plant, fault, staged):
    await plant(fault)
    if staged:
        await tested.replica.stage(tested.update(1))
    await tested.replica.pause()
    with pytest.raises(EngineError, match=r"replica-0.*version 1"):
        await tested.load(1)
    with pytest.raises(EngineError):
        await tested.replica.resume()


async def accepted(tested, plant, folder):
    """Faults in single parameters that a load of version 1 after version 0 accepts, or refuses without a name.

    folder: for version 1 with other norms, because those of all models are 1.
    """
    found = []
    tensors = [
        (name, tensor * torch.linspace(0.5, 1.5, tensor.shape[-1]) if "norm" in name else tensor)
        for name, tensor in read_update(tested.update(1).path)
    ]
    update = write_update(folder, version=1, tensors=tensors)
    await tested.replica.pause()
    for fault in PARTLY_WRONG:
        await plant("")
        await tested.load(0)
        await plant(fault)
        try:
            await tested.replica.load(update)
            found.append(fault)
        except EngineError as error:
            if not all(part in str(error) for part in (f"{tested.replica.name}: version 1", "made of ")):
                found.append(f"{fault}: {error}")
    await plant("")
    await tested.load(0)
    await tested.resume()
    return found


async def test_a_load_that_left_or_misplaced_a_single_parameter_or_expert_is_refused(tested, plant, tmp_path):
    assert await accepted(tested, plant, tmp_path) == []


async def test_a_checksum_is_of_the_weights_and_changes_with_tensors_swapped_in_a_parameter(tested, plant):
    sums = [await tested.replica.checksum()]
    for version, fault in ((1, ""), (0, ""), (1, TRADED)):
        await plant(fault)
        await tested.publish(version=version)
        sums.append(await tested.replica.checksum())
    assert sums[0] == sums[2]
    assert len(set(sums)) == 3


async def test_the_probe_finds_tensors_swapped_in_a_parameter_and_accepts_a_good_load(tested, plant):
    probe, truth = probe_of(tested), ScoresOfTruth(tested, version=1)
    await tested.publish(version=1)
    probe.ask_all(version=1)
    assert await probe.compare(1, truth) <= FLOAT32_MAX_K3
    await tested.publish(version=0)
    await plant(TRADED)
    await tested.publish(version=1)
    probe.ask_all(version=1)
    with pytest.raises(MismatchError) as caught:
        await probe.compare(1, truth)
    assert "replica-0" in str(caught.value) and "version 1" in str(caught.value)
