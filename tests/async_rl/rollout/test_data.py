"""Prompts from rows of all kinds."""

import itertools
import json
import random
from dataclasses import replace
from datetime import datetime
from decimal import Decimal

import numpy as np
import pytest

from agent_loop.chat import Chat
from agent_loop.loop import Message, Prompt, ToolUse
from async_rl.rollout.data import Epochs, PromptFormat, Stream, open_rows, split_rows
from recipes.calculator.tokenizer import CHAT_TEMPLATE, END_OF_TURN, build_tokenizer

ROWS = [{"prompt": f"q{i}\u2028", "answer": str(i)} for i in range(7)]  # with a character that ends no line


def rows_of(source, *, seed=0):
    return open_rows(source, seed=seed, name="prompts")


@pytest.fixture
def paths(tmp_path):
    datasets = pytest.importorskip("datasets")
    lines = "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    (tmp_path / "rows.jsonl").write_bytes(f"\ufeff{lines}".encode())
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


def test_a_stream_forgets_old_rows_and_still_finds_them(monkeypatch):
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


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
USED = (ToolUse(id="c1", name="add", arguments='{"a": 2, "b": 2}'),)


TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
PLAIN_CALL = {"name": "add", "arguments": {"a": 2, "b": 2}, "id": "c1"}
NO_TEXT = {"content": None}


@pytest.mark.parametrize(
    ("role", "message", "found"),
    [
        ("user", {"content": TWO_PARTS}, {"content": "a\nb"}),
        ("user", {"content": [TWO_PARTS[0] | {"image_url": None}], "tool_calls": None}, {"content": "a"}),
        ("user", {"content": np.array(TWO_PARTS[:1])}, {"content": "a"}),
        ("user", {"content": "a", "name": "ann", "weight": 1}, {"content": "a", "name": "ann"}),
        ("user", {"content": "smile \ud83d\ude00 \ud83d"}, {"content": "smile 😀 \ufffd"}),
        ("developer", {"content": "a"}, {"role": "system", "content": "a"}),
        ("assistant", NO_TEXT | {"tool_calls": [CALL]}, {"content": "", "tool_calls": USED}),
        (
            "assistant",
            NO_TEXT | {"tool_calls": np.array([{**CALL, "id": None}])},
            {"content": "", "tool_calls": (replace(USED[0], id="call_0"),)},
        ),
        ("assistant", {"tool_calls": [PLAIN_CALL]}, {"content": "", "tool_calls": USED}),
        ("assistant", {"content": "4", "reasoning_content": "2 and 2"}, {"content": "4", "reasoning": "2 and 2"}),
        ("tool", {"tool_call_id": "c1", "content": "4"}, {"tool_call_id": "c1", "content": "4"}),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_message_in_the_format_of_openai_is_kept_whole(role, message, found):
    row = {"role": role} | message
    for messages in ([row], (row,), np.array([row])):
        (kept,) = PromptFormat().prompt({"messages": messages}, index=0).messages
        assert kept == Message(**{"role": role} | found)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, r"content\[0\]\.type is 'image_url'"),
        ({"content": [{"type": "text"}]}, r"content\[0\]\.text is missing"),
        ({"content": None}, "content is None; give a text"),
        ({"content": 12}, "content is 12"),
        ({"content": float("nan")}, "content is None"),
        ({"content": {"text": "a"}}, "content is"),
        ({"content": b"a"}, "content is b'a'"),
        ({"content": "a", "images": ["x"]}, "images is"),
        ({"role": None, "content": "a"}, "role is missing"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "arguments is None"),
        ({"role": "assistant", "tool_calls": "f()"}, r"tool_calls is 'f\(\)'"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "function_call is"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_message_that_is_no_text_is_refused_with_row_field_and_value(message, named):
    with pytest.raises(ValueError, match=rf"^row 3: messages\[0\]\..*{named}"):
        PromptFormat().prompt({"messages": [{"role": "user"} | message]}, index=3)


def test_calls_and_reasoning_of_a_row_reach_the_chat_template():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages | tojson }}" + CHAT_TEMPLATE
    chat = Chat(tokenizer, end_of_turn=END_OF_TURN)
    rows = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "reasoning_content": "add", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    rendered = chat.decode(chat.prompt(PromptFormat().prompt({"messages": rows}, index=0).messages))
    given = json.loads(rendered.partition("]<|")[0] + "]") if "]<|" in rendered else json.loads(rendered)
    assert given[1]["tool_calls"] == [{**CALL, "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}]
    assert (given[1]["reasoning_content"], given[1]["content"], given[2]["tool_call_id"]) == ("add", "", "c1")


def test_two_system_messages_of_row_and_task_are_refused():
    row = {"messages": [{"role": "system", "content": "B"}, {"role": "user", "content": "hi"}]}
    with pytest.raises(ValueError, match="row 2 has a system message"):
        PromptFormat(system="A").prompt(row, index=2)


def tables():
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(ROWS)
    yield frame
    yield frame.set_index(frame["answer"]).sort_index(ascending=False)[::-1]
    yield pyarrow.Table.from_pylist(ROWS)
    yield np.array(ROWS)
    yield pytest.importorskip("datasets").Dataset.from_list(ROWS)


def test_a_table_has_the_rows_of_a_list():
    for table in tables():
        rows = rows_of(table)
        assert [PromptFormat().prompt(rows[i], index=i).target for i in range(len(rows))] == ROWS, table
    series = pytest.importorskip("pandas").Series(["a", "b"], index=[7, 8])
    assert list(rows_of(series)) == ["a", "b"]


@pytest.mark.parametrize("make", ["generator", "iterator", "set", "bytes", "DatasetDict", "IterableDataset"])
def test_a_source_without_rows_by_number_is_refused_in_one_line(make):
    dataset = pytest.importorskip("datasets").Dataset.from_list(ROWS)
    source = {
        "generator": (row for row in ROWS),
        "iterator": iter(ROWS),
        "set": {"a"},
        "bytes": b"rows",
        "DatasetDict": pytest.importorskip("datasets").DatasetDict(train=dataset),
        "IterableDataset": dataset.to_iterable_dataset(),
    }[make]
    with pytest.raises(ValueError, match=f"prompts is a .*{make}.*; give") as caught:
        rows_of(source)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("source", [[], {}, 3, "absent.jsonl", "rows.csv", "{", "\n\n", ""])
def test_a_source_of_another_kind_or_a_damaged_or_empty_file_is_refused(tmp_path, source):
    if source in ("{", "\n\n", ""):
        (tmp_path / "rows.jsonl").write_text(source)
        source = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match="prompts"):
        rows_of(source)


def test_values_of_parquet_are_those_of_json(tmp_path):
    pandas = pytest.importorskip("pandas")
    day = datetime(2026, 1, 2)
    frame = pandas.DataFrame(
        {
            "messages": [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in "qr"],
            "answer": [51, None],
            "tests": [["a", "b"], []],
            "day": [day, None],
            "price": [Decimal("1.50"), None],
            "level": ["x", None],
        }
    )
    frame.to_parquet(tmp_path / "rows.parquet")
    sources = [frame, pandas.read_parquet(tmp_path / "rows.parquet"), tmp_path / "rows.parquet"]
    for source in sources:
        rows = rows_of(source)
        first, second = (PromptFormat().prompt(rows[i], index=i) for i in range(2))
        columns = {name: first.target[name] for name in ("answer", "tests", "day", "price", "level")}
        assert columns == {"answer": 51, "tests": ["a", "b"], "day": day, "price": Decimal("1.50"), "level": "x"}
        assert [second.target[name] for name in columns] == [None, [], None, None, None]
        assert [prompt.messages[0].content for prompt in (first, second)] == ["q", "r"]
        with pytest.raises(ValueError, match="column level of row 1 has no value"):
            PromptFormat(template="{level}").prompt(rows[1], index=1)
