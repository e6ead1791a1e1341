"""Draft tokens of vLLM: the joint distribution of what is sampled with them is that of the model."""

import asyncio
import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from agent_loop.engine import GenerateRequest, SamplingConfig
from async_rl.inference.vllm import config as vllm_config
from tests.conformance.served import SPECULATION, VLLM, start_vllm
from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint, spread_model

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.filterwarnings("ignore"),
]

VOCAB, SAMPLED = 4, 5  # 1,024 continuations, all of which the model can score
PROMPT = np.array([0, 1, 2, 3, 3, 1, 0, 2, 2, 1, 3, 0], np.int32)  # each token occurred, so each is followed by drafts
AT_ONCE = 64
FALSE_ALARM = 1e-6  # chance that an exact engine fails


def joint_probabilities(model, *, temperature):
    """float64 [VOCAB ** SAMPLED] of all continuations of the prompt, in the order of `itertools.product`."""
    endings = torch.tensor(list(itertools.product(range(VOCAB), repeat=SAMPLED)))
    ids = torch.cat([torch.from_numpy(PROMPT).long().expand(len(endings), -1), endings], dim=1)
    with torch.no_grad():
        logits = model(ids).logits[:, len(PROMPT) - 1 : -1].double()
    logprobs = (logits / temperature).log_softmax(-1).gather(2, endings.unsqueeze(2))
    return logprobs.sum(dim=(1, 2)).exp().numpy()


def chance(counts, probabilities):
    """p-value of the chi-squared test of counts; cells with fewer than five expected samples are one cell."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    found, wanted = (np.append(values[~rare], values[rare].sum()) for values in (counts, expected))
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    half = torch.tensor([len(found) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("sampled", [20_000, pytest.param(100_000, marks=pytest.mark.nightly)])
async def test_tokens_have_the_joint_distribution_of_the_model(environment, tmp_path, monkeypatch, report, sampled):
    architecture = qwen3_moe_config(vocab_size=VOCAB)
    checkpoint = save_checkpoint(architecture, tmp_path / "model", seed=0)
    temperature = 2.0  # the most that vLLM takes
    monkeypatch.setattr(vllm_config, "NGRAMS", {"prompt_lookup_min": 1, "prompt_lookup_max": 3})
    replica = await start_vllm(replace(VLLM, speculation=SPECULATION), checkpoint=checkpoint)
    sampling, places = SamplingConfig(temperature=temperature), asyncio.Semaphore(AT_ONCE)
    counts = Counter()

    async def ask(number):
        request = GenerateRequest(
            request_id=str(number), token_ids=PROMPT, max_new_tokens=SAMPLED, existing_rows=11, sampling=sampling
        )
        async with places:
            [segment] = await replica.generate(request)
        counts[tuple(segment.token_ids.tolist())] += 1

    try:
        await asyncio.gather(*map(ask, range(sampled // SAMPLED)))
        drafts = (await replica.stats()).drafts
    finally:
        await replica.close()
    assert 0.1 * drafts.proposed < drafts.accepted < 0.9 * drafts.proposed
    assert drafts.proposed > 0.5 * sampled
    found = np.array([counts[ending] for ending in itertools.product(range(VOCAB), repeat=SAMPLED)])
    p = chance(found, joint_probabilities(spread_model(architecture, seed=0), temperature=temperature))
    report(f"{sampled} tokens with drafts ({drafts.accepted / drafts.proposed:.0%} accepted): p = {p:.2g}")
    assert p > FALSE_ALARM
