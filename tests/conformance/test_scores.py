"""Logprobs of given tokens, as teachers return them, against one float64 forward of transformers."""

import asyncio

import numpy as np
import pytest

from async_rl.inference.scores import ScoreRequest
from message_queue.errors import AnswerError
from tests.conformance.engines import MARKS, VOCAB, tokens
from tests.conformance.reference import reference
from tests.helpers import numerics

pytestmark = [*MARKS, pytest.mark.parametrize("server", ["vllm", "sglang"], indirect=True)]


@pytest.mark.parametrize(("first", "top_k"), [(1, 0), (20, 5), (199, 64)])
async def test_given_tokens_are_scored_over_the_whole_vocabulary(tested, served_models, report, first, top_k):
    """200 tokens: the prefill has three chunks."""
    token_ids = tokens(200)
    found = await tested.replica.score(
        ScoreRequest(request_id=f"score-{first}.", token_ids=token_ids, first=first, top_k=top_k)
    )
    expected = reference(served_models.models[0], token_ids)
    wanted = expected.logprobs[first - 1 :]
    at = np.arange(len(wanted))
    difference = np.abs(found.logprobs - wanted[at, token_ids[first:]]).max()
    report(f"scores from position {first}: off by {difference:.1e}, bound {expected.logprob_bound:.1e}")
    numerics.assert_within(difference, expected.logprob_bound)
    assert len(found) == 200 - first and found.top_k == top_k
    if top_k:
        of_ids = np.take_along_axis(wanted, found.ids.astype(np.int64), 1)
        numerics.assert_within(np.abs(found.top_logprobs - of_ids).max(), expected.logprob_bound)
        least = np.sort(wanted, 1)[:, -top_k]
        numerics.assert_within((least - of_ids.min(1)).max(), 2 * expected.logprob_bound, "a more likely token")


async def test_scores_do_not_depend_on_the_requests_next_to_them(tested, served_models):
    requests = [ScoreRequest(request_id=f"many-{i}.", token_ids=tokens(30 + i, seed=i)) for i in range(12)]
    both = [await asyncio.gather(*map(tested.replica.score, requests)) for _ in range(2)]
    for request, *found in zip(requests, *both, strict=True):
        expected = reference(served_models.models[0], request.token_ids)
        wanted = expected.logprobs[np.arange(len(request.token_ids) - 1), request.token_ids[1:]]
        for each in found:
            numerics.assert_within(np.abs(each.logprobs - wanted).max(), expected.logprob_bound)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"first": 0}, "first"),
        ({"first": 9}, "first"),
        ({"token_ids": np.full(9, VOCAB, np.int32)}, "token_ids"),
        ({"top_k": VOCAB + 1}, "top_k"),
        ({"token_ids": np.zeros(512, np.int32)}, "max_model_len"),
    ],
)
async def test_a_request_that_no_engine_can_serve_is_refused(tested, changes, field):
    fields = {"request_id": "bad.", "token_ids": tokens(9), **changes}
    with pytest.raises(AnswerError, match=field):
        await tested.replica.score(ScoreRequest(**fields))


async def test_a_cancelled_request_leaves_the_engine_and_one_with_a_longer_id_stays(tested):
    ids = ("score-1", "score-10")
    gone, stays = (
        asyncio.create_task(tested.replica.score(ScoreRequest(request_id=name, token_ids=tokens(300)))) for name in ids
    )
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert len(await stays) == 299
