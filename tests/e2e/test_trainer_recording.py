"""Rollouts that the real trainer records: tokens and logprobs of the rollouts, and the values that it trained with."""

from dataclasses import replace

import numpy as np
import pytest

from async_rl.controller.prepare import prepare, recorded_groups
from async_rl.files.rollouts import RecordConfig, read_steps
from async_rl.trainer.batch.baselines import GRPO
from async_rl.trainer.batch.training_batch import RecordedGroups
from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.recording import RecordingError, RolloutRecorder
from async_rl.trainer.state.optimizer import OptimizerConfig
from message_queue.heads import head_of
from message_queue.queue import Batch
from message_queue.tokens import StopReason, TokenOutput, WeightVersion
from message_queue.training_sequence import content_of
from message_queue.trajectory import PromptGroup, Trajectory
from tests.helpers import numerics
from tests.helpers.losses import batch_config
from tests.parallel.support import MARKS, VOCAB, start_trainer

pytestmark = [*MARKS, pytest.mark.usefixtures("owner")]

UPDATE, MIN_UPDATE = 10, 9
ADAM = OptimizerConfig(lr=1e-2, clip_grad=0.0)
LOSS = DecoupledPPO(clip_low=0.02, clip_high=0.02)
OPTIONS = {"optimizer": ADAM, "loss": LOSS, "router_replay": "none", "updates_per_batch": 2}


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Numbers:
    """A tokenizer whose text is the ids; token 0 is a tool call."""

    def decode(self, token_ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return " ".join(CALL if token == 0 else str(token) for token in token_ids)


def text(token_ids):
    return Numbers().decode(token_ids, skip_special_tokens=False)


def sampled(rng, tokens, *, version, stop_reason=StopReason.STOP, first=None):
    ids = rng.integers(1, VOCAB, tokens).astype(np.int32)
    if first is not None:
        ids[0] = first
    return TokenOutput(
        token_ids=ids,
        logprobs=rng.uniform(-7, -3, tokens).astype(np.float32),
        routed_experts=None,
        weights=WeightVersion(version, "digest"),
        stop_reason=stop_reason,
        replica=f"replica-{version % 2}",
    )


def rollout(rng, *, reward, stop_reason=StopReason.STOP):
    """Two turns; an abort cuts the first, and weights that are too old sample the start of the second."""
    made = Trajectory(routing=None)
    made.observe(rng.integers(1, VOCAB, 5).astype(np.int32))
    made.extend(sampled(rng, 4, version=9, stop_reason=StopReason.ABORT, first=0))
    made.extend(sampled(rng, 3, version=10))
    made.observe(rng.integers(1, VOCAB, 2).astype(np.int32))
    made.extend(sampled(rng, 2, version=8, stop_reason=StopReason.LENGTH))
    made.extend(sampled(rng, 6, version=10))
    made.close(stop_reason=stop_reason, reward=reward, info={"reward/right": reward, "turns": 2.0})
    return made


def groups():
    """Group 3 has no spread, and in group 5 a rollout failed."""
    rng, error = np.random.default_rng(0), StopReason.ERROR
    ends = {
        3: [(1.0, StopReason.STOP)] * 2,
        4: [(1.0, StopReason.STOP), (0.0, StopReason.LENGTH)],
        5: [(0.0, error), (0.0, StopReason.STOP), (2.0, StopReason.STOP)],
        6: [(0.0, StopReason.STOP), (1.0, StopReason.STOP)],
    }
    return [
        PromptGroup(
            group=number,
            prompt=number + 100,
            admitted_version=8,
            admitted_update=8,
            trajectories=[rollout(rng, reward=reward, stop_reason=stop) for reward, stop in members],
        )
        for number, members in ends.items()
    ]


def prepared(made):
    heads = [head_of(group) for group in made]
    versions = {version: version for version in (8, 9, 10)}
    batch = prepare(
        Batch(groups=heads, update=UPDATE, version_updates=versions, min_update=MIN_UPDATE),
        [content_of(group) for group in made],
        batch_config(advantage=GRPO(), updates=2),
        version_updates=versions,
    ).batch
    return replace(batch, recorded=recorded_groups(heads, trajectories=64, seed=0, train_step=UPDATE + 2))


def start_recording(checkpoint, directory, **changes):
    recorder = RolloutRecorder(directory, config=RecordConfig(steps=1), tokenizer=Numbers())
    return start_trainer(checkpoint, recorder=recorder, **(OPTIONS | changes))


def record(checkpoint, directory, batch):
    """Metrics and rows of a train step."""
    trainer = start_recording(checkpoint, directory)
    before = trainer.logprobs(batch)
    metrics = trainer.train(batch)
    trainer.save(directory / "state").result()  # waits for the file
    ((step, table),) = read_steps(directory)
    assert step == UPDATE + 2
    return metrics, table.to_pylist(), before


def sampled_values(row, name):
    return np.array([value for value in row[name] if value is not None], np.float32)


def assert_shares(rows):
    """The shares are those of the derivative of DecoupledPPO by each logprob; all tokens of the batch are in `rows`."""
    for mini_batch in (0, 1):
        found, expected = [], []
        for row in rows:
            if row["mini_batch"] != mini_batch:
                continue
            for at, share in enumerate(row["gradient_share"]):
                if share is None:
                    assert row["effect"][at] in (None, "too_old", "no_spread")
                    continue
                behaviour, proximal, current = (
                    np.float64(row[name][at]) for name in ("behaviour_logprobs", "proximal_logprobs", "logprobs")
                )
                correction = min(np.exp(proximal - behaviour), LOSS.behaviour_weight_cap)
                weight = correction * np.exp(current - proximal) * ("clip" not in row["effect"][at])
                found.append(share)
                expected.append(abs(row["advantage"]) * weight)
        assert found and found == pytest.approx(np.array(expected) / np.sum(expected), rel=1e-3)
        assert mini_batch == 0 or min(found) == 0, "a clipped token has no share"


def test_recorded_rollouts_are_what_was_sampled_and_trained(checkpoint, tmp_path):
    made = groups()
    batch = prepared(made)
    metrics, rows, before = record(checkpoint, tmp_path, batch)
    flat = [(group, number, t) for group in made for number, t in enumerate(group.trajectories)]
    assert [(row["group"], row["trajectory"]) for row in rows] == [(g.group, number) for g, number, _ in flat]
    proximal, effects, difference = iter(before), [], []
    for row, (group, _, trajectory) in zip(rows, flat, strict=True):
        assert (row["prompt_index"], row["reward"]) == (group.prompt, trajectory.reward)
        assert row["stop_reason"] == trajectory.stop_reason and dict(row["info"]) == trajectory.info
        if trajectory.stop_reason is StopReason.ERROR:
            assert row["token_ids"] == [] and row["advantage"] is None and row["prompt"] is None
            continue
        ids = trajectory.token_ids()
        assert row["token_ids"] == ids.tolist()
        behaviour = np.concatenate([segment.logprobs for segment in trajectory.segments])
        assert np.array_equal(sampled_values(row, "behaviour_logprobs"), behaviour)
        places = [5, 6, 7, 8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21]
        assert [i for i, effect in enumerate(row["effect"]) if effect is not None] == places
        assert {i for i, effect in enumerate(row["effect"]) if effect == "too_old"} == {14, 15}
        now = UPDATE + row["mini_batch"]
        assert [(s["start"], s["tokens"], s["param_version"], s["staleness"]) for s in row["segments"]] == [
            (5, 4, 9, now - 9),
            (9, 3, 10, now - 10),
            (14, 2, 8, now - 8),
            (16, 6, 10, now - 10),
        ]
        ends = [(s["replica"], s["stop_reason"]) for s in row["segments"][:2]]
        assert ends == [("replica-1", "abort"), ("replica-0", "stop")]
        assert row["prompt"] == text(ids[:5])
        first, second = row["turns"]
        assert [first["text"], first["reply"]] == [text(ids[a:b]) for a, b in ((5, 12), (12, 14))]
        assert first["tool_calls"] == [{"name": "add", "arguments": '{"a": 1}', "error": None}]
        assert (second["text"], second["reply"], second["tool_calls"]) == (text(ids[14:]), "", [])
        trained = [effect not in (None, "too_old", "no_spread") for effect in row["effect"]]
        expected = next(proximal)
        if group.group == 3:
            assert not any(trained) and set(row["logprobs"]) == {None}
            continue
        assert trained == [i in places and i not in (14, 15) for i in range(len(ids))]
        assert sampled_values(row, "proximal_logprobs") == pytest.approx(expected.numpy(), abs=1e-4)
        current = sampled_values(row, "logprobs")
        difference += [*(np.array(row["behaviour_logprobs"])[trained].astype(np.float64) - current)]
        effects += [effect for effect, own in zip(row["effect"], trained, strict=True) if own]
        assert (row["mini_batch"] > 0) == (np.abs(current - sampled_values(row, "proximal_logprobs")).max() > 1e-3)
    assert_shares(rows)
    assert len(effects) == metrics["tokens"]
    for name in ("clip", "truncate"):
        count = sum(name in effect for effect in effects)
        assert count == pytest.approx(metrics[f"{name}/fraction"] * len(effects)) and count > 0
    assert np.mean(difference) == pytest.approx(metrics["mismatch/k1"], rel=1e-5)


def test_recorded_advantages_have_the_kl_of_the_reward(checkpoint, tmp_path):
    loss, batch = replace(LOSS, kl_coefficient=0.1, kl_in="reward"), prepared(groups())
    trainer = start_recording(checkpoint, tmp_path, loss=loss)
    reference = start_trainer(checkpoint, router_replay="none").logprobs(batch)
    trainer.train(batch)
    kl = [(p - r).double().numpy() for p, r in zip(trainer.logprobs(batch), reference, strict=True)]
    metrics = trainer.train(batch)
    trainer.save(tmp_path / "state").result()
    ((_, table),) = read_steps(tmp_path)
    rows = [row for row in table.to_pylist() if row["advantage"] is not None]
    assert len(rows) == len(kl) == 8 and all("no_spread" not in row["effect"] for row in rows)
    drift = 2 * numerics.rounding(len(kl[0])) * max(abs(of).sum() for of in kl)
    assert min(abs(of.sum()) for of in kl) > 100 * drift
    for at in range(0, len(rows), 2):
        first, second = (rows[i]["reward"] - 0.1 * kl[i].sum() for i in (at, at + 1))
        expected = (first - second) / 2 / (abs(first - second) / 2**0.5 + 1e-6)
        assert rows[at]["advantage"] == pytest.approx(expected, rel=1e-3)
        assert rows[at + 1]["advantage"] == pytest.approx(-expected, rel=1e-3)
    assert metrics["kl/penalty"] == pytest.approx(np.mean([0.1 * of.sum() for of in kl]), rel=1e-3)
    assert metrics["kl/proximal"] == pytest.approx(np.mean(np.concatenate(kl)), rel=1e-3)


def test_a_part_of_the_groups_is_recorded_with_the_same_values(checkpoint, tmp_path):
    batch = prepared(groups())
    _, rows, _ = record(checkpoint, tmp_path / "all", batch)
    part = RecordedGroups(train_step=UPDATE + 2, heads={at: batch.recorded.heads[at] for at in (1, 3)})
    _, some, _ = record(checkpoint, tmp_path / "some", replace(batch, recorded=part))
    assert some == [row for row in rows if row["group"] in (4, 6)]
    nothing = RecordedGroups(train_step=UPDATE + 2, heads={0: batch.recorded.heads[0]})
    _, none, _ = record(checkpoint, tmp_path / "none", replace(batch, recorded=nothing))
    assert none == [row for row in rows if row["group"] == 3]


def test_recording_on_a_disk_that_refuses_stops_the_next_step_or_save(checkpoint, tmp_path):
    (tmp_path / "rollouts").write_text("no folder")
    trainer = start_recording(checkpoint, tmp_path / "rollouts")
    batch = prepared(groups())
    trainer.train(batch)
    with pytest.raises(RecordingError, match=r"rollout\.record\.steps"):
        trainer.save(tmp_path / "state").result()
    trainer.train(batch)
    with pytest.raises(RecordingError, match="train step 12"):
        trainer.train(batch)
