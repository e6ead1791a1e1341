"""Prompt sources continue where they stopped; a bad prompt file is refused with its line."""

import pytest

from agent_loop.loop import Message, Prompt
from async_rl.data.prompts import PromptFile, PromptSource


class Numbers:
    def train_prompt(self, index):
        return Prompt(index=index, messages=(Message(role="user", content=str(index)),), target={})


def drawn(source, count):
    indices = []
    for _ in range(count):
        indices.append(source.current().index)
        source.advance()
    return indices


def test_unfinished_prompts_of_a_stopped_run_come_first():
    assert drawn(PromptSource(Numbers(), cursor=7, unfinished=[5, 2]), 4) == [2, 5, 7, 8]


def test_a_prompt_that_was_not_admitted_is_handed_out_again():
    source = PromptSource(Numbers())
    assert source.current().index == source.current().index == 0
    assert source.cursor == 0


def test_a_prompt_file_is_a_new_permutation_each_epoch(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(f'{{"messages": [{{"role": "user", "content": "{i}"}}], "target": {{"n": {i}}}}}\n' for i in range(20))
    )
    prompts = PromptFile(path, seed=1)
    first, second = ([prompts.train_prompt(e * 20 + i).target["n"] for i in range(20)] for e in range(2))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert [PromptFile(path, seed=1).train_prompt(i).target["n"] for i in range(20)] == first


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "has no prompts"),
        ('{"messages": 3}\n', "line 1"),
        ('\n{"messages": [\n', "line 2"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_prompt_file_is_refused_with_field_and_place(tmp_path, content, part):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"task\.prompt_file") as caught:
        PromptFile(path, seed=0)
    assert part in str(caught.value) and str(path) in str(caught.value)
