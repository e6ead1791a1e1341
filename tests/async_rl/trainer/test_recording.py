"""Routing rows of recorded rollouts: as the engine gave them, within a bound, through the file."""

import json
from dataclasses import replace

import numpy as np
import pytest

from async_rl.files.rollouts import read_steps, write_step
from async_rl.trainer.batch.advantage import Advantages
from async_rl.trainer.batch.training_batch import RecordedGroups, training_batch
from async_rl.trainer.recording import rollout_table
from message_queue.heads import head_of
from message_queue.tokens import StopReason
from message_queue.training_sequence import content_of
from message_queue.trajectory import PromptGroup, Trajectory
from tests.helpers.groups import SPEC, routed, segment, trajectory

BYTES = 2 * 2 * 2  # of the row of a token: two layers, two experts, two bytes each


class Numbers:
    """A tokenizer whose text is the ids."""

    def decode(self, token_ids, *, skip_special_tokens):
        return " ".join(map(str, token_ids))


def recorded(tmp_path, *, routing_bytes, routing=SPEC):
    """Schema and rows of the file of a group: 5 tokens without the first row, a failed rollout, and 8 tokens."""

    def rollout(tokens, *, unavailable=0):
        rows = None if routing is None else routed(unavailable, 1 + tokens, unavailable=unavailable)
        return trajectory(replace(segment(tokens), routed_experts=rows), routing=routing)

    members = [rollout(3, unavailable=1), rollout(2), rollout(6)]
    members[1].stop_reason = StopReason.ERROR
    group = PromptGroup(group=5, prompt=0, admitted_version=0, admitted_update=0, trajectories=members)
    head = head_of(group)
    batch = training_batch(
        [head],
        [content_of(group)],
        advantages=Advantages(values=np.ones(2, np.float32), informative=np.ones(2, np.bool_)),
        current_update=0,
        version_updates={0: 0},
    )
    batch = replace(batch, recorded=RecordedGroups(train_step=1, heads={0: head}))
    layers = SPEC.layers if routing else ()
    table = rollout_table(batch, {}, tokenizer=Numbers(), moe_layers=layers, routing_bytes=routing_bytes)
    write_step(tmp_path, table, train_step=1, keep=1)
    ((_, table),) = read_steps(tmp_path)
    return table.schema, table.to_pylist()


def test_each_path_with_sampled_tokens_is_a_row():
    root = trajectory_of_paths()
    rows = rows_of(PromptGroup(group=5, prompt=0, admitted_version=0, admitted_update=0, trajectories=[root]))
    assert [(row["trajectory"], row["path"], row["reward"]) for row in rows] == [(0, 0, 1.0), (0, 2, 1.0)]
    assert [row["token_ids"] for row in rows] == [[0, 1, 0, 1, 2], [0, 1, 0, 1, 2, 7, 0, 1]]
    assert [sum(p is not None for p in row["behaviour_logprobs"]) for row in rows] == [3, 2]
    assert [[turn["text"] for turn in row["turns"]] for row in rows] == [["0 1 2"], ["0 1"]]
    assert [row["prompt"] for row in rows] == ["0 1", "0 1 0 1 2 7"]


def test_path_of_an_untrained_agent_is_a_row_without_advantage():
    root = trajectory_of_paths()
    root.paths[2].agent, root.stop_reason = "critic", None
    root.close(stop_reason=StopReason.STOP, reward=1.5, rewards={"policy": 1.0})
    group = PromptGroup(group=5, prompt=0, admitted_version=0, admitted_update=0, trajectories=[root])
    rows = rows_of(group)
    assert [(row["path"], row["agent"], row["advantage"]) for row in rows] == [(0, "policy", 1.0), (2, "critic", None)]
    assert [[e for e in row["effect"] if e] for row in rows] == [["no_spread"] * 3, ["untrained"] * 2]
    assert [[p is not None for p in row["behaviour_logprobs"]] for row in rows] == [
        [False, False, True, True, True],
        [False] * 6 + [True, True],
    ]
    assert [row["segments"][0]["start"] for row in rows] == [2, 6]


def rows_of(group):
    """Recorded rows of a group of one trained trajectory, without values of the trainer."""
    head = head_of(group)
    batch = training_batch(
        [head],
        [content_of(group)],
        advantages=Advantages(values=np.ones(1, np.float32), informative=np.ones(1, np.bool_)),
        current_update=0,
        version_updates={0: 0},
    )
    batch = replace(batch, recorded=RecordedGroups(train_step=1, heads={0: head}))
    return rollout_table(batch, {}, tokenizer=Numbers()).to_pylist()


def trajectory_of_paths():
    """A root of 5 tokens, an empty fork, and a fork of 8 tokens."""
    root = Trajectory(routing=None)
    root.observe(np.arange(2, dtype=np.int32))
    root.extend(segment(3))
    root.fork(turns=1)
    fork = root.fork(turns=1)
    fork.observe(np.array([7], np.int32))
    fork.extend(segment(2))
    root.close(stop_reason=StopReason.STOP, reward=1.0)
    return root


def test_recorded_routing_rows_are_those_of_the_engine(tmp_path):
    schema, rows = recorded(tmp_path, routing_bytes=1000)
    assert schema.metadata[b"moe_layers"] == b"[1, 3]"
    none = [[-1, -1]] * 2
    expected = routed(1, 4).experts.astype(int).tolist()
    assert rows[0]["routed_experts"] == [none, *expected, none], "-1 for the missing row and for the last token"
    assert rows[1]["routed_experts"] is None
    assert rows[2]["routed_experts"] == [*routed(0, 7).experts.astype(int).tolist(), none]


@pytest.mark.parametrize(
    ("tokens", "kept"), [(13, [True, False, True]), (12, [True, False, False]), (4, [False] * 3), (0, None)]
)
def test_recorded_routing_rows_stay_within_their_bytes(tmp_path, tokens, kept):
    _, rows = recorded(tmp_path, routing_bytes=tokens * BYTES)
    if tokens == 0:
        assert all("routed_experts" not in row for row in rows)
    else:
        assert [row["routed_experts"] is not None for row in rows] == kept


def test_a_dense_model_has_no_routing_column(tmp_path):
    schema, _ = recorded(tmp_path, routing_bytes=1000, routing=None)
    assert "routed_experts" not in schema.names


def test_sampled_text_that_utf8_cannot_hold_is_recorded(tmp_path, monkeypatch):
    said = r'<tool_call>{"name": "\udc00", "arguments": {"\ud800": "\ud83d\ude00 \ud83d", "a": "\u0000"}}</tool_call>'
    monkeypatch.setattr(Numbers, "decode", lambda *_, **__: said)
    _, rows = recorded(tmp_path, routing_bytes=0)
    [call] = rows[0]["turns"][0]["tool_calls"]
    assert (call["name"], call["error"]) == ("\ufffd", None)
    assert json.loads(call["arguments"]) == {"\ufffd": "😀 \ufffd", "a": "\x00"}


def test_a_call_in_reasoning_that_the_prompt_opened_is_not_recorded(tmp_path, monkeypatch):
    texts = iter(["ask <think>\n", "<tool_call>{}</tool_call>", "reply"] * 2)
    monkeypatch.setattr(Numbers, "decode", lambda *_, **__: next(texts))
    _, rows = recorded(tmp_path, routing_bytes=0)
    assert [turn["tool_calls"] for turn in rows[0]["turns"]] == [[]]
