"""The pipeline compares engines and trainer under every published version."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rl.config.schema import FLOAT32_MAX_K3, HALF_LEAST_K3, HALF_MAX_K3, MismatchConfig
from async_rl.controller.parts import StageError
from async_rl.controller.probe import FIRST_PROBES, MismatchError, Probe, k3_of_replicas
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.stub import InProcess
from async_rl.rollout.schedule import read_schedule
from async_rl.run import causes
from async_rl.trainer.batch.training_batch import supervised_batch
from message_queue.errors import AnswerError
from message_queue.training_sequence import content_of
from message_queue.trajectory import PromptGroup
from tests.flow.harness import FakeTrainer, Harness
from tests.helpers.fakes import SPEC, FakeEngine, SeededScript
from tests.helpers.groups import segment, trajectory

pytestmark = pytest.mark.virtual_time

PROBE = MismatchConfig()


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
async def test_pipeline_probes_every_version_by_the_weights_it_was_exported_from(tmp_path, on_update):
    options = [{"name": "a"}, {"name": "b"}]
    harness = Harness(tmp_path, steps=6, probe=PROBE, on_update=on_update, replica_options=options)
    assert await harness.run()
    assert harness.trainer.scored == list(range(7))
    assert [line["mismatch/k3_probe"] for line in harness.lines("metrics.jsonl")] == [0.0] * 6
    for replica in harness.replicas:
        asked = [r for r in replica.requests if r.session.startswith("probe")]
        sessions = sorted(f"probe{version}-{number}" for version in range(7) for number in range(4))
        assert sorted(r.session for r in asked) == sessions
        assert len({tuple(r.token_ids.tolist()) for r in asked}) == 4, "the same prompts"
        limits = {(r.max_new_tokens, r.sampling.top_p, r.sampling.top_k, r.stop_token_ids) for r in asked}
        assert limits == {(PROBE.tokens, 1.0, -1, ())}


@pytest.mark.parametrize("version", [0, 1, 3, 5])
async def test_pipeline_stops_before_the_version_after_one_that_differs(tmp_path, version):
    harness = Harness(tmp_path, steps=5, probe=PROBE, trainer=FakeTrainer(wrong_about=version))
    with pytest.raises((StageError, ExceptionGroup)) as caught:
        await harness.run()
    (line,) = causes(caught.value)
    assert all(part in line for part in ("MismatchError", "fake-0", f"version {version}", "mismatch.max_k3"))
    assert harness.trainer.exported == list(range(1, version + 1))


async def test_pipeline_only_reports_a_difference_without_a_bound(tmp_path):
    probe = MismatchConfig(max_k3=None)
    harness = Harness(tmp_path, steps=4, probe=probe, trainer=FakeTrainer(wrong_about=2))
    assert await harness.run()
    found = [line["mismatch/k3_probe"] for line in harness.lines("metrics.jsonl")]
    assert found == pytest.approx([0.0, 0.0, math.exp(-0.5) - 0.5, 0.0])


@pytest.mark.parametrize(
    ("options", "scored"),
    [
        ({"steps": 6, "publish_every": 2, "probe": PROBE}, [0, 1, 2, 3]),
        ({"steps": 2}, []),
        ({"steps": 4, "probe": PROBE, "replica_options": [{"die_at_load": 2}, {}]}, [0, 1, 2, 3, 4]),
    ],
    ids=["published versions only", "no probe", "a dead replica"],
)
async def test_pipeline_scores_the_versions_it_probes(tmp_path, options, scored):
    harness = Harness(tmp_path, **options)
    assert await harness.run()
    assert harness.trainer.scored == scored
    assert scored or not any(r.session.startswith("probe") for r in harness.replicas[0].requests)


async def test_trainer_does_not_wait_for_answers_of_a_probe(tmp_path):
    trainer = FakeTrainer()
    harness = Harness(tmp_path, steps=6, probe=PROBE, trainer=trainer)
    probe, asked = harness.pipeline._probe, []
    decode = probe._decode

    async def late(*request, version):
        asked.append(version)
        while len(trainer.batches) < {0: 1, 1: 3}.get(version, 0):  # noqa: ASYNC110 - of the trainer's state
            await asyncio.sleep(0.001)
        return await decode(*request, version=version)

    probe._decode = late
    trainer.may_end = lambda: len(trainer.batches) < 3 or harness._is_probed()
    assert await harness.run()
    assert sorted({*asked}) == [0, 1, 4, 5, 6]
    assert trainer.scored == [0, 4, 5, 6], "the answers about version 1 are of later weights"


async def test_pipeline_keeps_a_schedule_whether_it_probes_or_not(tmp_path):
    free = Harness(tmp_path / "free", steps=5, token_s=0.001)
    await free.run()
    kept = Harness(tmp_path / "kept", steps=5, token_s=0.001, probe=PROBE, schedule=read_schedule(tmp_path / "free"))
    kept.trainer.may_end = lambda: True  # a load may come after a step
    assert await kept.run()
    assert kept.trainer.scored[0] == 0


def asked(*replicas, prompts, version=0, dtype="float32", same_experts=True):
    """A probe that has asked all replicas."""
    probe = Probe(
        ReplicaPool(replicas),
        config=PROBE,
        dtypes=(dtype,),
        same_experts=same_experts,
        temperature=1.0,
        max_tokens=64,
        timeout_s=0.5,
        routing=SPEC,
    )
    probe.take_prompts(groups(prompts))
    probe.ask_all(version=version)
    return probe


def groups(count):
    """Content of groups whose prompts differ in length."""
    identity = {"prompt": 0, "admitted_version": 0, "admitted_update": 0}
    made = [[trajectory(segment(3), prompt=3 + number)] for number in range(count)]
    return [content_of(PromptGroup(group=i, trajectories=t, **identity)) for i, t in enumerate(made)]


class Scores(InProcess):
    """Scores as the engine does, but `d` higher for the first `tokens` tokens of sequence `sequence`."""

    def __init__(self, *, sequence=0, d=0.0, tokens=None):
        self._sequence, self._d, self._count = sequence, d, tokens

    async def score(self, batch):
        scored = [torch.from_numpy(batch.loss_tokens(number).logprobs) for number in range(len(batch))]
        scored[self._sequence][: self._count] += self._d
        self.tokens = int(batch.num_loss_tokens.sum())
        return scored


def engines(count, **options):
    return [
        FakeEngine(SeededScript(0, vocab_size=40, stop_token=1, mean_length=12), name=f"fake-{i}", **options)
        for i in range(count)
    ]


@pytest.mark.parametrize(("sequence", "d", "named"), [(6, 0.1, "fake-1"), (0, math.nan, "fake-0")])
async def test_probe_names_the_replica_that_differs_and_the_version(sequence, d, named):
    probe = asked(*engines(2), prompts=4)
    with pytest.raises(MismatchError) as caught:
        await probe.compare(0, Scores(sequence=sequence, d=d))
    assert named in str(caught.value) and "version 0" in str(caught.value)


async def test_probe_leaves_out_answers_that_were_refused():
    fail = lambda r: AnswerError("nonsense") if r.session.endswith("-0") else None  # noqa: E731
    probe, scores = asked(*engines(1, fail=fail), prompts=3), Scores()
    assert await probe.compare(0, scores) == 0.0
    assert scores.tokens == 2 * PROBE.tokens


@pytest.mark.parametrize(("prompts", "version"), [(0, 0), (1, 7)], ids=["no prompts", "another version"])
async def test_probe_without_an_answer_has_no_value(prompts, version):
    probe = asked(*engines(1), prompts=prompts, version=version)
    assert math.isnan(await probe.compare(version, Scores()))


async def test_probe_loses_a_replica_that_does_not_answer_in_time():
    fast, slow = engines(1)[0], engines(1, token_s=60.0)[0]
    slow.name = "slow-0"
    probe, scores = asked(fast, slow, prompts=2), Scores()
    assert await asyncio.wait_for(probe.compare(0, scores), 30) == 0.0
    assert scores.tokens == 2 * PROBE.tokens
    assert [member.name for member in probe._pool.live] == [fast.name]


async def test_probe_that_is_cancelled_leaves_no_request_behind():
    (engine,) = engines(1, token_s=60.0)
    probe = asked(engine, prompts=2)
    while engine.in_flight < 2:  # noqa: ASYNC110 - the fake has no event for it
        await asyncio.sleep(0)
    probe.cancel()
    while engine.in_flight:  # noqa: ASYNC110 - the fake has no event for it
        await asyncio.sleep(0)


def test_k3_of_replicas_is_the_mean_over_the_tokens_of_each():
    batch = supervised_batch([(np.arange(3, dtype=np.int32), np.arange(3) >= first) for first in (1, 2)])
    (sequences,) = batch.contents
    sampled = [np.array([-1.0, -1.0], np.float32), np.array([-2.0], np.float32)]
    content = tuple((replace(s, logprobs=logprobs),) for (s,), logprobs in zip(sequences, sampled, strict=True))
    batch = replace(batch, contents=[content])
    scored = [torch.tensor([-0.9, -1.1]), torch.tensor([-2.0])]
    found = k3_of_replicas(scored, batch, replicas=["a", "b"])
    assert found["a"] == pytest.approx((math.exp(0.1) - 1.1 + math.exp(-0.1) - 0.9) / 2, rel=1e-5)
    assert found["b"] == 0.0


@pytest.mark.parametrize(
    ("max_k3", "dtypes", "noise", "bound"),
    [
        ("auto", ("float32", "float32"), [3e-2], FLOAT32_MAX_K3),
        ("auto", ("bfloat16", "float32"), [], HALF_MAX_K3),
        ("auto", ("bfloat16", "bfloat16"), [1e-6, 5e-2, 2e-6], HALF_LEAST_K3),
        ("auto", ("bfloat16", "bfloat16"), [2e-4, 6e-4, 3e-4], 3e-3),
        ("auto", ("float16", "float16"), [8e-3], HALF_MAX_K3),
        (None, ("bfloat16", "bfloat16"), [1e-6], math.inf),
        (0.25, ("bfloat16", "bfloat16"), [1e-6], 0.25),
    ],
)
def test_max_k3_follows_the_first_probes_in_half_precision_unless_it_is_given(max_k3, dtypes, noise, bound):
    assert MismatchConfig(max_k3=max_k3).bound(dtypes=dtypes, noise=noise) == pytest.approx(bound)


def k3_of(d):
    return math.exp(d) - 1 - d


async def compare_in_turn(probe, *, ds):
    """Largest k3 of one version after the other, whose first sequence has the difference `d`."""
    found = []
    for version, d in enumerate(ds):
        if version:
            probe.ask_all(version=0)
        found.append(await probe.compare(0, Scores(d=d)))
    return found


async def test_the_bound_of_a_bfloat16_run_is_ten_times_its_noise_from_the_second_probe_on():
    """Stale experts have a k3 of 2.2e-2 where the noise is 1e-4 to 7e-4; the first probes alone set the noise."""
    quiet = [0.02] * FIRST_PROBES + [0.05] * (FIRST_PROBES + 1)
    probe = asked(*engines(1), prompts=1, dtype="bfloat16")
    assert await compare_in_turn(probe, ds=quiet) == pytest.approx([k3_of(d) for d in quiet], rel=1e-3)
    probe.ask_all(version=0)
    with pytest.raises(MismatchError, match=r"fake-0.*version 0"):
        await probe.compare(0, Scores(d=0.07))
    assert 10 * k3_of(0.02) < k3_of(0.07) < 3 * 1e-3


async def test_a_first_probe_that_is_wrong_stops_a_bfloat16_run_or_sets_no_loose_bound():
    with pytest.raises(MismatchError):
        await asked(*engines(1), prompts=1, dtype="bfloat16").compare(0, Scores(d=0.2))
    probe = asked(*engines(1), prompts=1, dtype="bfloat16")
    await compare_in_turn(probe, ds=[0.13])
    probe.ask_all(version=0)
    with pytest.raises(MismatchError):
        await probe.compare(0, Scores(d=0.2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_without_the_engines_experts_a_quarter_of_the_tokens_may_differ_by_anything_and_more_may_not(dtype):
    """Sequences have 16 tokens, and those of the first one differ: a quarter of four sequences, half of two."""
    options = {"dtype": dtype, "same_experts": False}
    assert await asked(*engines(1), prompts=4, **options).compare(0, Scores(d=3.0)) == 0.0
    for prompts, scores, changed in (
        (2, Scores(d=0.5), {}),
        (4, Scores(d=3.0), {"same_experts": True}),
        (4, Scores(d=math.nan, tokens=1), {}),
        (4, Scores(d=math.inf, tokens=1), {}),
    ):
        with pytest.raises(MismatchError):
            await asked(*engines(1), prompts=prompts, **(options | changed)).compare(0, scores)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"max_k3": 0.0}, "mismatch.max_k3"), ({"prompts": -1}, "mismatch.prompts"), ({"tokens": 0}, "mismatch.tokens")],
)
def test_mismatch_config_refuses_values_out_of_range(fields, named):
    with pytest.raises(ValueError, match=named):
        MismatchConfig(**fields)
