"""The comparison of an engine with the trainer after a publish, with transformers in place of the trainer."""

import numpy as np
import torch

from async_rl.config import MismatchConfig
from async_rl.controller.probe import Probe
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.stub import InProcess
from async_rl.trainer.batch.training_batch import TrainingBatch
from message_queue.training_sequence import SampledRun, TrainingSequence
from tests.conformance.engines import EngineUnderTest, prompts


class ScoresOfTruth(InProcess):
    """Scores by transformers with the weights of a version, over the rows of the engine, whose weights are not used."""

    def __init__(self, tested: EngineUnderTest, *, version: int) -> None:
        self._tested = tested
        self._version = version

    async def score(self, batch: TrainingBatch) -> list[torch.Tensor]:
        scored: list[torch.Tensor] = []
        for number in range(len(batch)):
            sequence, at = batch.sequence(number), batch.loss_tokens(number).positions
            assert sequence.routed_experts is not None
            ids, forced = sequence.token_ids, sequence.routed_experts[:-1]
            found = self._tested.truth([(self._version, len(ids))], ids, forced=forced).logprobs
            scored.append(torch.from_numpy(found[at - 1, ids[at]].astype(np.float32)))
        return scored


def probe_of(tested: EngineUnderTest, *, dtype: str = "float32", same_experts: bool = True) -> Probe:
    """The probe of a run, with prompts. same_experts: False for a run without rows of the engine."""
    probe = Probe(
        ReplicaPool([tested.replica]),
        config=MismatchConfig(),
        dtypes=(dtype,),
        same_experts=same_experts,
        temperature=1.0,
        max_tokens=256,
        timeout_s=60.0,
        routing=tested.routing,
    )
    run, logprobs = SampledRun(20, 1, 0), np.zeros(1, np.float32)  # the last token stands for a sampled one
    sequences = [
        TrainingSequence(token_ids=ids, runs=(run,), logprobs=logprobs, rows=None, row_runs=())
        for ids in prompts(4, length=21)
    ]
    probe.take_prompts([((sequence,),) for sequence in sequences])
    return probe
