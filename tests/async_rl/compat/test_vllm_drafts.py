"""Samples of a step that requests keep: those up to the first that is not its draft."""

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("sampled", "drafts", "num_drafts", "tokens", "rejected"),
    [
        ([7, 4, 2, 5, 8], [7, 4, 9], [3, 0], [[7, 4, 2, -1], [8, -1, -1, -1]], [1, 0]),
        ([7, 4, 9, 5], [7, 4, 9], [3], [[7, 4, 9, 5]], [0]),
        ([1, 4, 9, 5], [7, 4, 9], [3], [[1, -1, -1, -1]], [3]),  # what agrees behind a rejected draft does not count
        ([8, 6, 3, 3], [3], [0, 0, 1], [[8, -1], [6, -1], [3, 3]], [0, 0, 0]),
        ([8, 6], [], [0, 0], [[8], [6]], [0, 0]),
    ],
)
def test_samples_are_kept_up_to_the_first_that_is_not_the_draft(sampled, drafts, num_drafts, tokens, rejected):
    from vllm.v1.outputs import LogprobsTensors  # warns at its import

    from async_rl.compat.vllm_drafts import Verified

    sampled = torch.tensor(sampled, dtype=torch.int32)
    found = Verified.of(sampled, torch.tensor(drafts, dtype=torch.int32), num_drafts)
    assert found.tokens.tolist() == tokens
    assert found.rejected.tolist() == rejected
    assert found.counts.tolist() == [sum(token >= 0 for token in row) for row in tokens]
    assert sampled[found.kept_rows].tolist() == [token for row in tokens for token in row if token >= 0]
    ids, logprobs, ranks = sampled.unsqueeze(1), -sampled.unsqueeze(1).float(), sampled.long()
    padded = found.logprobs(LogprobsTensors(ids, logprobs, ranks)).filter(found.tokens.flatten() >= 0)
    kept = sampled[found.kept_rows]
    assert padded.logprob_token_ids.flatten().tolist() == padded.selected_token_ranks.tolist() == kept.tolist()
    assert padded.logprobs.flatten().tolist() == (-kept.float()).tolist()
