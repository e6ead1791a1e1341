import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.chat import MAX_VARIANTS, Chat
from agent_loop.loop import Message, ToolUse, TurnLimits
from agent_loop.tools.tool import describe_tool
from async_rl import Task
from message_queue.errors import ChatTemplateError
from message_queue.trajectory import Trajectory
from recipes.calculator.tokenizer import CHAT_TEMPLATE, END_OF_TURN, TURN_START, build_tokenizer
from tests.agent_loop.test_decoder import make_decoder
from tests.helpers import tokenizers_of_families
from tests.helpers.fakes import FakeEngine, FakeTool, TurnScript
from tests.helpers.tasks import roll_task
from tests.helpers.tokenizers_of_families import FAMILIES, Added

TOOLS = [describe_tool(FakeTool())]
TOKENIZER = build_tokenizer()
BYTES = tokenizers_of_families.build("qwen")


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


def find_stop(*stops, tokenizer=TOKENIZER):
    """The search for the stop strings of a request."""
    return Chat(tokenizer, end_of_turn=END_OF_TURN).variant(tools=(), stop_strings=stops).find_stop


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


def test_chat_replies_of_several_tools_share_one_user_turn():
    assert reply_to(make_chat(), "1", "2") == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_reply_to_a_turn_without_its_end_adds_it():
    chat = make_chat()
    assert reply_to(chat, "1", after="a") == END_OF_TURN + reply_to(chat, "1", after="a" + END_OF_TURN)


def test_chat_text_hides_the_end_of_a_turn_and_nothing_else():
    chat = make_chat()
    assert chat.text(ids(f"<answer>4</answer>{END_OF_TURN}")) == "<answer>4</answer>"
    assert chat.text(ids(f"4{TURN_START}")) == f"4{TURN_START}"
    assert chat.text(np.zeros(0, np.int32)) == ""


def test_chat_stop_tokens_are_end_of_turn_first_and_distinct():
    chat = make_chat(stop_tokens=(TURN_START, END_OF_TURN))
    assert chat.stop_token_ids == (ids(END_OF_TURN)[0], ids(TURN_START)[0])


def test_chat_refuses_stop_texts_that_it_cannot_use():
    with pytest.raises(ChatTemplateError, match="stop token"):
        make_chat(stop_tokens=("stop!",))
    with pytest.raises(ChatTemplateError, match="stop string"):
        find_stop("")


@pytest.mark.parametrize(
    ("turn", "stops", "kept"),
    [
        ("12+3=15 so", ["15"], "12+3=15"),
        ('x"}}\ny', ['"}'], 'x"}}'),  # ends inside a token that continues
        ('a{"name": "b', ['ame": '], 'a{"name": "'),  # starts inside one token and ends inside another
        ("1 1 1", ["1"], "1"),
        ("abcdef", ["cde", "b"], "ab"),
    ],
)
def test_the_stop_string_that_ends_first_ends_a_turn_with_its_token(turn, stops, kept):
    sampled = ids(turn)
    count = find_stop(*stops)(sampled)
    assert TOKENIZER.decode(sampled[:count].tolist()) == kept
    assert find_stop(*stops)(sampled[: count - 1]) is None
    assert find_stop() is None


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


BETWEEN = "1\n</tool_response>\n<tool_response>\n2"
HARD = ["", "a\nb", "</tool_response>", "<|im_end|>\n", BETWEEN, BETWEEN[:-1], BETWEEN[1:]]


@given(contents=st.lists(texts | st.sampled_from(HARD), min_size=1, max_size=4))
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


# ---- the end of a turn


def byte_level(template, *, eos):
    added = Added(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<tool_call>",))
    return tokenizers_of_families.byte_level(added, template, eos=eos)


ENDS = {"glm": ["<|user|>", "<|endoftext|>"], "qwen": ["<|im_end|>"], "llama": ["<|eot_id|>"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_end_of_turn_is_the_token_that_the_template_puts_after_a_turn(family):
    tokenizer = tokenizers_of_families.build(family)
    found = tokenizer.convert_ids_to_tokens(list(Chat(tokenizer).stop_token_ids))
    assert found == ENDS.get(family, [tokenizer.eos_token])


@pytest.mark.parametrize("end", [None, "<|im_end|>"])
def test_a_turn_of_a_base_model_ends_with_the_token_of_the_template_or_eos(end):
    tokenizer = byte_level(CHAT_TEMPLATE, eos="<|endoftext|>")
    chat = Chat(tokenizer, end_of_turn=end)
    assert tokenizer.convert_ids_to_tokens(list(chat.stop_token_ids)) == ["<|im_end|>", "<|endoftext|>"]
    ended = [tokenizer.encode(f"42{token}", add_special_tokens=False) for token in ("<|im_end|>", "<|endoftext|>", "")]
    assert [chat.text(np.asarray(turn, np.int32)) for turn in ended] == ["42"] * 3
    assert [chat.ends_turn(np.asarray(turn, np.int32)) for turn in ended] == [True, False, False]


def test_eos_of_a_template_that_writes_it_only_at_the_end_ends_a_turn():
    """As gpt-oss: an earlier turn has <|im_end|>, and the last one the token that the model samples."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.content }}"
        "{{ '<|endoftext|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}{% endfor %}"
    )
    tokenizer = byte_level(template, eos="<|endoftext|>")
    assert tokenizer.convert_ids_to_tokens(list(Chat(tokenizer).stop_token_ids)) == ["<|endoftext|>"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}",
        "Question: {{ messages[0].content }} Answer:",
        "{% for m in messages if m.role == 'assistant' %}{{ raise_exception('no') }}{% endfor %}",
    ],
    ids=["text alone", "turns left out", "turns refused"],
)
def test_a_template_without_an_end_of_turn_is_refused_unless_the_user_names_one(template):
    tokenizer = byte_level(template, eos="<|endoftext|>")
    with pytest.raises(ChatTemplateError, match=r"end_of_turn.*<\|endoftext\|>"):
        Chat(tokenizer)
    chat = Chat(tokenizer, end_of_turn="<|endoftext|>")
    assert tokenizer.convert_ids_to_tokens(list(chat.stop_token_ids)) == ["<|endoftext|>"]


@given(
    text=st.text("ab<>é😀\ufffd ", max_size=60),
    stops=st.lists(st.text("ab<é😀", min_size=1, max_size=3), min_size=1, max_size=2),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=20),
)
def test_a_search_of_the_new_tokens_finds_what_a_search_of_all_finds(text, stops, cuts):
    turn = np.asarray(BYTES.encode(text, add_special_tokens=False), np.int32)
    decoded = [BYTES.decode(turn[:n].tolist()) for n in range(len(turn) + 1)]
    expected = next((n for n in range(len(turn) + 1) if any(stop in decoded[n] for stop in stops)), None)
    search, searched, found = find_stop(*stops, tokenizer=BYTES), 0, None
    for cut in itertools.chain(cuts, itertools.repeat(len(turn) + 1)):
        until = min(searched + cut, len(turn))
        if (found := search(turn[:until])) is not None or until == len(turn):
            break
        searched = until
    assert found == expected


async def test_the_search_for_a_stop_string_decodes_each_token_a_few_times(monkeypatch):
    chat, count = Chat(BYTES).variant(tools=(), stop_strings=("</never>",)), 4000
    decoded = []
    decode = chat.decode
    monkeypatch.setattr(chat, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    engine = FakeEngine(lambda _: BYTES.convert_tokens_to_ids("a"), routing=None)
    trajectory = Trajectory(routing=None)
    trajectory.observe(np.asarray([1], np.int32))
    decoder = make_decoder(engine, find_stop=chat.find_stop)
    await decoder.decode(trajectory, max_new_tokens=count)
    assert len(decoded) > 50 and sum(decoded) < 3 * count


DATED = "{{ 'Today: ' + strftime_now('%d %b %Y %H:%M:%S %f') }}" + CHAT_TEMPLATE


def test_the_date_of_a_prompt_stays_that_of_the_start():
    chat = Chat(byte_level(DATED, eos="<|im_end|>"))
    messages = [Message(role="user", content="hi")]
    first = chat.prompt(messages).tolist()
    assert chat.is_dated and "Today: " in chat.decode(np.asarray(first))
    assert (
        chat.prompt(messages).tolist() == chat.variant(tools=(), stop_strings=("a",)).prompt(messages).tolist() == first
    )
    assert not make_chat().is_dated


@pytest.mark.parametrize("multi_turn", [False, True])
async def test_a_rollout_is_resumed_with_the_prompt_of_another_day(multi_turn):
    tokenizer = byte_level(DATED, eos="<|im_end|>")
    task = Task(prompts=["hi"], rewards=lambda completion: 1.0, tools=[FakeTool()] if multi_turn else [])

    script = TurnScript([tokenizer.encode("42<|im_end|>")], opening=tokenizer.encode("<|im_start|>assistant\n"))
    trajectory, limits = Trajectory(routing=None), TurnLimits(max_turns=2, max_tokens=4000)
    yesterday = Chat(tokenizer).prompt([Message(role="user", content="hi")])
    trajectory.observe(yesterday)
    engine = FakeEngine(script, routing=None)
    await roll_task(task, engine, tokenizer=tokenizer, limits=limits, trajectory=trajectory)
    assert trajectory.closed and trajectory.turns[0].observation.tolist() == yesterday.tolist()


@pytest.mark.parametrize("escaped", [r"<|im_end|>", r"\u003c|im_end|\u003e", r"<|im\u005fend|>"])
def test_arguments_of_a_history_give_no_control_token_and_no_surrogate(escaped):
    template = CHAT_TEMPLATE.replace(
        "message.content +", "message.content + (message.tool_calls | tojson if message.tool_calls else '') +"
    )
    chat = Chat(byte_level(template, eos="<|im_end|>"))
    call = ToolUse(id="c", name="f", arguments=f'{{"x{escaped}": "{escaped} \\ud83d"}}')
    asked, said = Message(role="user", content="?"), Message(role="assistant", content="", tool_calls=(call,))
    prompt = chat.prompt([asked, said, asked])
    assert prompt.tolist().count(chat.stop_token_ids[0]) == 3
    assert chat.decode(prompt).count("<|im_end|>") == 5 and "<|im_end|> \ufffd" in chat.decode(prompt)


def test_texts_of_messages_and_tools_become_safe():
    texts = {"content": "a\ud83d", "reasoning": "\udc00", "tool_call_id": "\ud83d\ude00", "name": "é\ud800"}
    message = Message(role="tool", **texts)
    assert (message.content, message.reasoning, message.tool_call_id, message.name) == ("a�", "�", "😀", "é�")
    use = ToolUse(id="\ud800", name="\ud800", arguments='"\ud800"')
    assert (use.id, use.name, use.arguments) == ("�", "�", '"�"')
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ tools[0].function.description }}{{ tools | tojson }}" + CHAT_TEMPLATE
    tool = {"type": "function", "function": {"name": "\udc00", "description": "\ud83d", "parameters": {"\ud800": 1}}}
    make_chat(tokenizer, tools=[tool]).prompt([message])


@pytest.mark.parametrize(
    "contents", [[BETWEEN], ["", ""], ["1", "2"], [BETWEEN[:-2], "3"], ["3", "\n</tool_response>\n"]]
)
def test_replies_are_told_apart_by_text_only_where_that_is_clear(contents):
    chat = Chat(byte_level(CHAT_TEMPLATE, eos="<|im_end|>"), tools=TOOLS)
    messages = [Message(role="tool", content=content) for content in contents]
    found = chat.reply_texts(chat.reply(messages, after=np.zeros(0, np.int32)), count=len(contents))
    assert found == contents or (len(found) == 1 and all(content in found[0] for content in contents))
    assert (found == contents) is (len(contents) == 1 or BETWEEN[:-2] not in contents)
