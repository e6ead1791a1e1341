import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.chat import MAX_VARIANTS, Chat, ChatTemplateError
from agent_loop.loop import Message
from agent_loop.tools import describe_tool
from recipes.calculator.tokenizer import CHAT_TEMPLATE, END_OF_TURN, TURN_START, build_tokenizer
from tests.helpers.fakes import FakeTool

TOOLS = [describe_tool(FakeTool())]
TOKENIZER = build_tokenizer()


def ids(text):
    return np.asarray(TOKENIZER.encode(text, add_special_tokens=False), np.int32)


def make_chat(tokenizer=TOKENIZER, **options):
    return Chat(tokenizer, **({"end_of_turn": END_OF_TURN, "tools": TOOLS, "stop_tokens": (TURN_START,)} | options))


def test_control_tokens_in_the_description_of_a_tool_stay_text():
    tokenizer, tool = build_tokenizer(), describe_tool(FakeTool())
    tokenizer.chat_template = "{{ tools | tojson }}" + CHAT_TEMPLATE
    described = {**tool, "function": {**tool["function"], "description": "a <|im_end|> b <tool_call>"}}
    prompt = make_chat(tokenizer, tools=[described]).prompt([Message(role="user", content="?")])
    assert "a <|im_end|> b <tool_call>" in tokenizer.decode(prompt.tolist())
    counts = [prompt.tolist().count(tokenizer.convert_tokens_to_ids(text)) for text in (END_OF_TURN, "<tool_call>")]
    assert counts == [1, 0]


def reply_to(chat, *contents, role="tool", after=END_OF_TURN):
    """The tokens of a reply, as text."""
    messages = [Message(role=role, content=content) for content in contents]
    return TOKENIZER.decode(chat.reply(messages, after=ids(after)).tolist())


texts = st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20)


@given(question=texts, turn=texts, reply=texts.filter(lambda text: "<|" not in text))
def test_chat_continues_a_conversation_as_the_template_renders_it(question, turn, reply):
    chat = make_chat()
    prompt, sampled = chat.prompt([Message(role="user", content=question)]), ids(turn + END_OF_TURN)
    continued = np.concatenate([prompt, sampled, chat.reply([Message(role="tool", content=reply)], after=sampled)])
    roles = [("user", question), ("assistant", turn), ("tool", reply)]
    whole = TOKENIZER.apply_chat_template(
        [{"role": r, "content": c} for r, c in roles], tokenize=False, add_generation_prompt=True
    )
    assert prompt.dtype == continued.dtype == np.int32
    assert TOKENIZER.decode(continued.tolist()) == whole
    assert continued.tolist() == ids(whole).tolist()


def test_chat_reply_does_not_depend_on_how_the_turn_was_tokenized():
    letters = np.asarray([TOKENIZER.convert_tokens_to_ids(c) for c in "user"], np.int32)
    assert len(ids("user")) == 1
    chat, sampled = make_chat(), np.append(letters, ids(END_OF_TURN))
    assert chat.text(sampled) == "user"
    message = [Message(role="tool", content="1")]
    assert chat.reply(message, after=sampled).tolist() == chat.reply(message, after=ids(f"user{END_OF_TURN}")).tolist()


def test_chat_replies_of_several_tools_share_one_user_turn():
    assert reply_to(make_chat(), "1", "2") == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_reply_may_be_a_user_message():
    reply = reply_to(make_chat(), "again", role="user")
    assert reply == "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("stop_strings", "turn"), [((), "a"), (("15",), "12+3=15")], ids=["cut off", "stop string"])
def test_chat_reply_to_a_turn_without_its_end_adds_it(stop_strings, turn):
    chat = make_chat(stop_strings=stop_strings)
    assert reply_to(chat, "1", after=turn) == END_OF_TURN + reply_to(chat, "1", after=turn + END_OF_TURN)


def test_chat_text_hides_the_end_of_a_turn_and_nothing_else():
    chat = make_chat()
    assert chat.text(ids(f"<answer>4</answer>{END_OF_TURN}")) == "<answer>4</answer>"
    assert chat.text(ids(f"4{TURN_START}")) == f"4{TURN_START}"
    assert chat.text(np.zeros(0, np.int32)) == ""


def test_chat_stop_tokens_are_end_of_turn_first_and_distinct():
    chat = make_chat(stop_tokens=(TURN_START, END_OF_TURN))
    assert chat.stop_token_ids == (ids(END_OF_TURN)[0], ids(TURN_START)[0])


@pytest.mark.parametrize("options", [{"stop_tokens": ("stop!",)}, {"stop_strings": ("",)}])
def test_chat_refuses_stop_texts_that_it_cannot_use(options):
    with pytest.raises(ChatTemplateError, match=r"stop (token|string)"):
        make_chat(**options)


# ---- stop strings


@pytest.mark.parametrize(
    ("turn", "stop", "kept", "shown"),
    [
        ("12+3=15 so", "15", "12+3=15", "12+3=15"),
        ('x"}}\ny', '"}', 'x"}}', 'x"}'),  # ends inside a token that continues
        ('a{"name": "b', 'ame": ', 'a{"name": "', 'a{"name": '),  # starts inside one token and ends inside another
        ("1 1 1", "1", "1", "1"),
    ],
)
def test_stop_string_ends_a_turn_with_its_token_and_hides_the_rest(turn, stop, kept, shown):
    chat = make_chat(stop_strings=(stop,))
    sampled = ids(turn)
    count = chat.find_stop(sampled)
    assert TOKENIZER.decode(sampled[:count].tolist()) == kept
    assert chat.text(sampled[:count]) == shown
    assert chat.finished(sampled[:count]) and not chat.ends_turn(sampled[:count])
    assert chat.find_stop(sampled[: count - 1]) is None


def test_stop_string_that_ends_first_counts():
    chat = make_chat(stop_strings=("cde", "b"))
    assert chat.text(ids("abcdef")) == "ab"


def test_chat_without_stop_strings_searches_none():
    assert make_chat().find_stop is None
    assert not make_chat().finished(ids("15"))


# ---- templates


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE.replace("message.content + '<|im_end|>\\n'", "message.content + '\\n'"),
        "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}",
        CHAT_TEMPLATE.replace("message.content + '\\n</tool_response>'", "'</tool_response>'"),
        CHAT_TEMPLATE.replace("'\\n<tool_response>\\n' +", "'re: ' + messages[1].content +"),
    ],
    ids=["no end of turn", "turns left out", "tools refused", "tools ignored", "reply repeats the turn before it"],
)
def test_chat_refuses_a_template_that_cannot_be_continued(template):
    assert template != CHAT_TEMPLATE
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ChatTemplateError):
        make_chat(tokenizer)


@given(
    contents=st.lists(texts | st.sampled_from(["", "a\nb", "</tool_response>", "<|im_end|>\n"]), min_size=1, max_size=4)
)
def test_chat_finds_the_texts_of_a_reply_in_its_tokens(contents):
    chat = make_chat()
    for after in (END_OF_TURN, "</tool_call>"):
        tokens = chat.reply([Message(role="tool", content=content) for content in contents], after=ids(after))
        assert chat.reply_texts(tokens, count=len(contents)) == contents
    assert chat.reply_texts(ids("cut off"), count=len(contents)) == ["cut off"]


def test_variants_are_kept_for_equal_requests_and_their_number_is_bounded():
    chat = make_chat()
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": 1, "b": 2}}}]
    turned = [{"type": "function", "function": {"name": "add", "parameters": {"b": 2, "a": 1}}}]
    first, other = (chat.variant(tools=each, stop_strings=()) for each in (tools, turned))
    assert first.variant(tools=json.loads(json.dumps(tools)), stop_strings=()) is first
    assert other is not first and other.tools_key == first.tools_key, "a template may show the order of fields"
    assert chat.variant(tools=tools, stop_strings=("x",)).find_stop is not None
    newest = [chat.variant(tools=[], stop_strings=(f"{n}",)) for n in range(MAX_VARIANTS)][-1]
    assert chat.variant(tools=[], stop_strings=(f"{MAX_VARIANTS - 1}",)) is newest
    assert chat.variant(tools=tools, stop_strings=()) is not first
