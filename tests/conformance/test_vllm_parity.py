"""What a vLLM replica samples from and where it stops; that it says the truth is in test_scenarios_*.py."""

from __future__ import annotations

import numpy as np
import pytest

from agent_loop.engine import SamplingConfig
from async_rl.inference.vllm.engine import VllmReplica
from message_queue.tokens import StopReason
from tests.conformance.conftest import Models, generate, prompt, request
from tests.conformance.reference import reference

pytestmark = [pytest.mark.numerics, pytest.mark.asyncio(loop_scope="package"), pytest.mark.filterwarnings("ignore")]


async def test_logprobs_are_of_the_distribution_after_temperature(replica: VllmReplica, models: Models):
    tokens = prompt(20)
    segment = await generate(replica, request("warm", tokens, sampling=SamplingConfig(temperature=2.0)))
    both = np.concatenate([tokens, segment.token_ids])
    expected = reference(models.reference_first, both)
    scaled = expected.logprobs / 2.0
    scaled -= np.log(np.exp(scaled).sum(-1, keepdims=True))
    at = np.arange(20, 44)
    assert np.abs(scaled[at - 1, both[at]] - segment.logprobs).max() <= expected.logprob_bound


async def test_a_stop_token_ends_the_decode_and_is_part_of_it(replica: VllmReplica):
    greedy = SamplingConfig(temperature=0.0)
    free = await generate(replica, request("free", prompt(20), sampling=greedy))
    stop = int(free.token_ids[5])
    segment = await generate(replica, request("stop", prompt(20), sampling=greedy, stop_token_ids=(stop,)))
    assert segment.stop_reason is StopReason.STOP
    assert segment.token_ids[-1] == stop
    assert stop not in segment.token_ids[:-1]
