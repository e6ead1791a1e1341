"""Prompts from rows of all kinds."""

import itertools
import json
import random

import pytest

from agent_loop.loop import Message, Prompt
from async_rl.rollout.data import Epochs, PromptFormat, Stream, open_rows, split_rows

ROWS = [{"prompt": f"q{i}", "answer": str(i)} for i in range(7)]


def rows_of(source, *, seed=0):
    return open_rows(source, seed=seed, name="prompts")


@pytest.fixture
def paths(tmp_path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    return tmp_path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "saved"])
def test_rows_of_a_file_are_those_that_were_written(paths, name):
    rows = rows_of(paths / name)
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert rows_of(str(paths / name))[3] == ROWS[3]


def test_rows_of_a_dataset_are_read_when_they_are_asked_for():
    dataset = pytest.importorskip("datasets").Dataset.from_list(ROWS)
    train, held_out = split_rows(rows_of(dataset), share=0.3, name="prompts")
    assert sorted(row["answer"] for row in [*train, *held_out]) == [row["answer"] for row in ROWS]


@pytest.mark.parametrize("text", ["{", "\n\n", ""])
def test_a_damaged_or_empty_file_of_rows_is_refused(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="prompts"):
        rows_of(path)


@pytest.mark.parametrize("source", [[], {}, 3, "absent.jsonl", "rows.csv"])
def test_a_source_of_another_kind_is_refused(source):
    with pytest.raises(ValueError, match="prompts"):
        rows_of(source)


def test_epochs_have_every_row_once_in_an_order_of_their_own():
    epochs = Epochs(range(7), seed=3)
    first, second = ([epochs[7 * epoch + i] for i in range(7)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(7)) and first != second
    assert [Epochs(range(7), seed=3)[i] for i in range(7, 14)] == second, "a restart in the second epoch"
    assert [Epochs(range(3), seed=None)[i] for i in range(5)] == [0, 1, 2, 0, 1]


def test_a_stream_repeats_its_rows_after_a_restart_and_for_smaller_indices():
    def numbers(seed):
        rng = random.Random(seed)
        while True:
            yield rng.random()

    stream = rows_of(numbers, seed=5)
    found = [stream[i] for i in (0, 1, 2, 9, 4)]
    again = rows_of(numbers, seed=5)
    assert [again[i] for i in (9, 4, 0, 1, 2)] == [found[3], found[4], *found[:3]]
    assert rows_of(numbers, seed=6)[0] != found[0]
    assert [rows_of(lambda: itertools.count())[i] for i in range(3)] == [0, 1, 2]


def test_a_stream_forgets_old_rows_and_finds_them_again(monkeypatch):
    monkeypatch.setattr("async_rl.rollout.data.CHECKED", 4)
    stream = Stream(itertools.count, name="prompts")
    assert [stream[i] for i in range(10)] == list(range(10))
    assert len(stream._recent) == 4 and stream[1] == 1


def test_an_error_or_an_end_of_a_stream_names_row_and_line():
    def ends():
        yield 1

    def fails():
        yield 1
        raise KeyError("absent")

    with pytest.raises(ValueError, match="after 1 rows"):
        rows_of(ends)[1]
    with pytest.raises(ValueError, match=rf"row 1: KeyError.*test_data\.py:{fails.__code__.co_firstlineno + 2}"):
        rows_of(fails)[1]


def test_held_out_rows_are_the_same_in_every_run_and_never_trained():
    train, held_out = split_rows(range(100), share=0.1, name="prompts")
    assert len(held_out) == 10 and sorted([*train, *held_out]) == list(range(100))
    assert list(split_rows(range(100), share=0.1, name="prompts")[1]) == list(held_out)
    for share in (0.0, 1.0, 0.001):
        with pytest.raises(ValueError, match="validation"):
            split_rows(range(100), share=share, name="prompts")


def test_a_prompt_of_a_row_has_its_messages_and_columns():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    user = (Message(role="user", content="q"),)
    assert PromptFormat().prompt("q", index=2) == Prompt(index=2, messages=user, target={"prompt": "q"})
    assert PromptFormat().prompt({"messages": messages}, index=0).messages == tuple(Message(**m) for m in messages)
    made = PromptFormat(template="{a}+{b}=?", system="add").prompt({"a": 1, "b": 2}, index=0)
    assert [m.content for m in made.messages] == ["add", "1+2=?"] and made.target == {"a": 1, "b": 2}
    assert PromptFormat().prompt(made, index=9) == Prompt(index=9, messages=made.messages, target=made.target)


@pytest.mark.parametrize(
    "template, row, named",
    [
        (None, {"question": "q"}, "question"),
        ("{a}", {"b": 1}, "'a'"),
        (None, {"messages": [{"role": "user"}]}, "content"),
    ],
)
def test_a_row_without_the_columns_is_refused(template, row, named):
    with pytest.raises(ValueError, match=named):
        PromptFormat(template=template).prompt(row, index=0)
    with pytest.raises(ValueError, match="int"):
        PromptFormat().prompt(3, index=0)
