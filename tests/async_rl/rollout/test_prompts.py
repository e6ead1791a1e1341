"""Prompt sources continue where they stopped; a bad prompt file is refused with its line."""

import pytest

from agent_loop.loop import Message, Prompt
from async_rl.rollout.prompts import PromptSource, read_order


def numbers(index):
    return Prompt(index=index, messages=(Message(role="user", content=str(index)),), target={})


def test_unfinished_prompts_of_a_stopped_run_come_first():
    source = PromptSource(numbers, cursor=7, unfinished=[5, 2])
    indices = []
    for _ in range(4):
        indices.append(source.current().index)
        source.advance()
    assert indices == [2, 5, 7, 8]


def test_a_prompt_file_is_a_new_permutation_each_epoch(tmp_path):
    path = tmp_path / "prompts.jsonl"
    line = '{{"messages": [{{"role": "user", "content": "\u2028"}}], "target": {{"n": {}}}}}\n'  # no end of a line
    path.write_text("\ufeff" + "".join(map(line.format, range(20))), encoding="utf-8")
    prompts = read_order(path, seed=1)
    first, second = ([prompts(e * 20 + i).target["n"] for i in range(20)] for e in range(2))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert [read_order(path, seed=1)(i).target["n"] for i in range(20)] == first


USER = '{"role": "user", "content": "1+1"}'


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["has no prompts"]),
        (None, ["cannot be read"]),
        ("\n" + f'{{"messages": [{USER}\n', ["line 2", "JSON"]),
        ("[" * 100_000, ["line 1", "JSON"]),
        (f"{USER}\n", ["line 1", "messages is missing"]),
        ("[1]\n", ["line 1"]),
        ('{"messages": "ab"}\n', ["line 1", "messages is 'ab'"]),
        ('{"messages": []}\n', ["line 1", "messages is []"]),
        ('{"messages": ["hello"]}\n', ["line 1", "messages.0 is 'hello'"]),
        ('{"messages": [{"role": "user"}]}\n', ["line 1", "messages.0.content is missing"]),
        ('{"messages": [{"role": 3, "content": "a"}]}\n', ["line 1", "messages.0.role is 3"]),
        ('{"messages": [{"role": "", "content": "a"}]}\n', ["line 1", "messages.0.role is ''"]),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}\n', ["line 1", "JSON"]),
        ('{"messages": [{"role": "user", "content": "a", "name": "x"}]}\n', ["line 1", "messages.0.name"]),
        (f'{{"messages": [{USER}], "targt": {{}}}}\n', ["line 1", "targt"]),
        (f'{{"messages": [{USER}]}}\n{{"messages": [{USER}], "target": [1]}}\n', ["line 2", "target is [1]"]),
        (f'{{"messages": [{USER}], "target": null}}\n', ["line 1", "target is None"]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_bad_prompt_file_is_refused_with_field_line_and_key(tmp_path, content, parts):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"task\.prompt_file") as caught:
        read_order(path, seed=0)
    assert [part for part in [*parts, str(path)] if part not in str(caught.value)] == []
    assert len(str(caught.value).splitlines()) == 1


def test_a_prompt_that_the_task_cannot_use_is_refused_with_its_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"messages": [{USER}], "target": {{"n": 1}}}}\n{{"messages": [{USER}]}}\n')

    def check(prompt):
        if "n" not in prompt.target:
            raise ValueError("target.n is missing")

    with pytest.raises(ValueError, match=r"task\.prompt_file") as caught:
        read_order(path, seed=0, check=check)
    assert "line 2" in str(caught.value) and "target.n is missing" in str(caught.value)
