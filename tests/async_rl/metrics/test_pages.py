"""Report and rollouts of a run in a real browser: they fit the window, load nothing, and every control works."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import pytest_asyncio
import yaml

from agent_loop.timeline import TimeSpan, now
from async_rl.files.rollouts import FOLDER, FailedRollouts, RecordConfig
from async_rl.files.starts import record_start
from async_rl.metrics import viewer
from async_rl.metrics.recorder import Recorder
from async_rl.metrics.registry import METRICS, StepRecord, of_layer
from async_rl.metrics.trace import Trace
from async_rl.report import main as report
from async_rl.view import main as view
from message_queue.ledger import Drop, DropKind
from tests.async_rl.metrics.test_observe import validated
from tests.async_rl.metrics.test_viewer import failed, row, write
from tests.helpers.chromium import CHROMIUM, browser
from tests.helpers.tokenizers_of_families import build

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH"),
    pytest.mark.asyncio(loop_scope="module"),
]

LONG = "a/very/long/path/without/any/space/" * 8
HOSTILE = "</script><img src=x onerror=document.title='broken'>\\u2028 & <b>bold</b> \udcff"
ERROR = f"RewardError: no unit in '{'7' * 200}' (/a/{LONG}own.py:7 in score)"
ZEROS = ("clip/fraction", "partial/resumed_fraction")
STEPS = 4


def record_steps(recorder, steps, *, shift=0.0):
    """Steps whose metrics are their number plus `shift`; those of ZEROS are 0."""
    recorder.lengths.offered([(2, True), (6, True)])
    for step in steps:
        metrics = {key: float(step + shift) for key in METRICS} | dict.fromkeys(ZEROS, 0.0) | {"train_step": step}
        metrics |= {of_layer("routing/overlap", layer): 0.1 * layer for layer in (1, 3)} | {"info/own": -3.5}
        recorder.step(StepRecord(metrics=metrics, staleness_tokens={0: 10, 2: 30}))


def make_run(directory, *, lr, shift=0.0):
    """A run of STEPS steps with all metrics, two rounds of validation, a dropped group and recorded rollouts."""
    recorder = Recorder(directory, console=None)
    record_steps(recorder, range(1, STEPS + 1), shift=shift)
    for step in (0, STEPS):
        recorder.validation(step, validated(0.25 + step / 10))
    drop = Drop(DropKind.ROLLOUT_FAILED, f"prompt 3: {ERROR} {HOSTILE}")
    recorder.ledger([{"group": 3, "outcome": "dropped", "kind": drop.kind, "reason": str(drop), "tokens": 12}])
    recorder.close()
    record_start(directory, command=f"python -m async_rl.run optimizer.lr={lr}", train_step=0)
    (directory / "config.yaml").write_text(yaml.safe_dump({"optimizer": {"lr": lr}, "output_dir": LONG}))
    write(directory, 2, [row(2, 0, n) for n in range(3)])
    write(directory, 4, [row(4, 1, 0), row(4, 1, 1, tokens=0), row(4, 2, 1, tokens=9), row(4, 2, 5)])
    write(directory, 6, [row(6, 3, 0), row(6, 3, 0, tokens=7, path=1, agent="critic")])
    records = FailedRollouts(directory / FOLDER, config=RecordConfig())
    records.add(failed(1, 1, error=ERROR, kind="RewardError", line=f"/a/{LONG}own.py:7 in score"), train_step=3)
    records.add(failed(9, 0, error="PromptError: too long", kind="PromptError"), train_step=3)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of the report of two runs and of the rollouts of the first."""
    first, second = (tmp_path_factory.mktemp("pages") / name for name in ("first", "second"))
    for directory, lr in ((first, 1e-3), (second, 2e-3)):
        directory.mkdir()
        make_run(directory, lr=lr, shift=lr)
    assert report([str(first), str(second)]) == 0 and view([str(first)]) == 0
    return [(first / name).as_uri() for name in ("report.html", "rollouts.html")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab(tmp_path_factory):
    async with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def page(tab):
    tab.errors.clear()
    tab.requests.clear()
    yield tab
    assert tab.errors == []
    assert [url for url in tab.requests if not url.startswith(("file:", "about:", "blob:", "data:"))] == []


WIDTHS = "[document.documentElement.scrollWidth, innerWidth]"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def texts_of(selector):
    """Script: texts of all elements of a selector."""
    return f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)"


def text_of(selector):
    return f"document.querySelector({selector!r}).textContent"


def chosen(select, value):
    """Script: choose a value of a field of the filters."""
    field = f"document.querySelector('[name={select}]')"
    return f"{field}.value = {value!r}; document.getElementById('filters').dispatchEvent(new Event('input'))"


def given(name, value, *, event="input"):
    """Script: give a value to the field of an id."""
    field = f"document.getElementById({name!r})"
    return f"{field}.value = {value!r}; {field}.dispatchEvent(new Event({event!r}))"


def count_is(count, of=10):
    return f"document.getElementById('count').textContent.startsWith('{count} of {of}')"


async def test_pages_fit_narrow_and_wide_windows_in_light_and_dark(pages, page):
    colours = set()
    for url in (*pages, f"{pages[1]}#step=4&group=1&trajectory=1"):
        for width, dark in ((390, False), (1280, True)):
            await page.open(url, width=width, dark=dark)
            await page.run("document.querySelectorAll('details.topic').forEach((topic) => (topic.open = true))")
            needed, window = await page.run(WIDTHS)
            assert needed <= window == width, url
            colours.add((dark, await page.run(BACKGROUND)))
    assert len(colours) == 2, "one background for light and one for dark"


# ---- report


def drawing(title):
    """Script: the chart of a title, with `data` and `layout` of Plotly."""
    return f"document.querySelector('[data-title={json.dumps(title)}] .drawing')"


async def lines_of(page, title, *, name=None):
    """(x, y) of the lines or bars of a chart, or of the ones with a name."""
    traces = await page.run(
        f"{drawing(title)}.data.map((t) => ({{x: [...t.x], y: [...t.y], name: t.name ?? null, type: t.type}}))"
    )
    return [(t["x"], t["y"]) for t in traces if name in (None, t["name"])]


async def unfold(page, topic):
    await page.run(f"document.querySelector('[data-topic={topic}]').open = true")
    await page.until(f"document.querySelector('[data-topic={topic}] .chart:last-child .drawing').data")


async def test_report_opens_with_five_charts_and_folds_the_others_by_topic_without_those_of_zeros(pages, page):
    await page.open(pages[0])
    first = await page.run(texts_of("#first h3"))
    assert first[0] == "Reward" and len(first) == 5
    assert await page.run("[...document.querySelectorAll('#topics .chart .drawing')].every((e) => !e.data)")
    topics = await page.run("[...document.querySelectorAll('.topic')].map((e) => e.dataset.topic)")
    assert topics == ["Reward", "Loss", "Critic", "Mismatch", "Routing", "Time", "Task"]
    await unfold(page, "Loss")
    for title in ("Learning rate", "KL", "Entropy"):
        assert (await lines_of(page, title))[0][0] == [1, 2, 3, 4]
    sentence = await page.run("document.querySelector('[data-title=Entropy] p').textContent")
    assert sentence == METRICS["entropy"].meaning + "."
    unit = await page.run(f"{drawing('Entropy')}.layout.yaxis.title.text")
    assert unit == METRICS["entropy"].unit
    zeros = await page.run(text_of("#zeros"))
    assert zeros.startswith("Always 0") and all(key in zeros for key in ZEROS) and "grad_norm" not in zeros
    assert "Partial rollouts" not in await page.run(texts_of(".chart h3")), "a list in place of charts"
    clipped = "Clipped, cut or masked tokens"
    assert await lines_of(page, clipped, name="clip/fraction") == []
    assert await lines_of(page, clipped, name="mask/fraction")


async def test_report_draws_categories_as_bars(pages, page):
    await page.open(pages[0])
    await unfold(page, "Routing")
    await unfold(page, "Mismatch")
    for title in ("overlap by layer", "Trained tokens by staleness", "Mismatch by staleness"):
        assert set(await page.run(f"{drawing(title)}.data.map((t) => t.type)")) == {"bar"}
    assert (await lines_of(page, "Trained tokens by staleness"))[0] == ([0, 2], [0.25, 0.75])
    lags = (await lines_of(page, "Mismatch by staleness"))[0][0]
    assert lags == ["0", "0, mixed", "1", "2", "3+"]


async def test_report_smooths_and_takes_the_axis_that_the_reader_chooses(pages, page):
    await page.open(pages[0])
    await page.run(given("smooth", 0.5))
    weights = [np.array([0.5**n for n in range(step)]) for step in range(1, 5)]
    expected = [float(np.arange(len(w), 0, -1) @ w / w.sum()) + 1e-3 for w in weights]
    raw = (await lines_of(page, "Throughput"))[0]
    assert len(raw[1]) == 4
    values = (await lines_of(page, "Reward", name="reward/mean"))[0][1]
    assert values == pytest.approx(expected), "weights 1, 1/2, 1/4, ... of the newest values"
    for axis, factor in (("hours", 1 / 3600), ("tokens", None)):
        await page.run(given("axis", axis, event="change"))
        x = (await lines_of(page, "Reward", name="reward/mean"))[0][0]
        sums = np.cumsum([step + 1e-3 for step in range(1, 5)]) * factor if factor else np.arange(1, 5) + 1e-3
        assert x == pytest.approx(list(sums), rel=1e-4)
        assert (await lines_of(page, "Reward", name="validation/success"))[0][0] == pytest.approx([0, x[-1]])


async def test_report_zooms_all_charts_together_and_has_logarithmic_axes(pages, page):
    await page.open(pages[0])
    where = "(({left, top, width, height}) => [left + width * .3, left + width * .6, top + height * .5])"
    plot = f"{drawing('Throughput')}.querySelector('.nsewdrag').getBoundingClientRect()"
    await page.run(f"{drawing('Throughput')}.scrollIntoView({{block: 'center'}})")
    start, end, y = await page.run(f"{where}({plot})")
    await page.drag((start, y), (end, y + 2))
    await page.until("state.range")
    wanted = await page.run("[...state.range]")
    assert 1 < wanted[0] < wanted[1] < 4
    await page.until(f"{drawing('Reward')}.layout.xaxis.range[0] === state.range[0]")
    await unfold(page, "Loss")
    assert await page.run(f"{drawing('Loss')}.layout.xaxis.range") == wanted, "charts that are opened later too"
    await page.run("$('reset').click()")
    await page.until(f"{drawing('Reward')}.layout.xaxis.range[0] <= 0.5")
    await page.run("document.querySelector('[data-title=Reward] .bar button').click()")
    await page.until(f"{drawing('Reward')}.layout.yaxis.type === 'log'")


async def test_report_hides_a_run_and_shows_runs_and_their_starts_next_to_each_other(pages, page):
    await page.open(pages[0])
    assert len(await lines_of(page, "Reward", name="reward/mean")) == 2
    await page.run("document.querySelector('#runs button').click()")
    await page.until(f"{drawing('Reward')}.data.length === 2")
    assert (await lines_of(page, "Reward", name="reward/mean"))[0][1][0] == pytest.approx(1.002)
    facts = await page.run(texts_of("#summary tr:first-child td"))
    assert facts[0] == "first" and facts[6] == "3", "1, 2, 3 and 4 tokens/s for as many seconds"
    differences = await page.run(text_of("#differences"))
    assert "optimizer.lr" in differences and "output_dir" not in differences
    starts = await page.run(text_of("#starts"))
    assert "python -m async_rl.run optimizer.lr=0.002" in starts and "async_rl 0.1.0" in starts


async def test_report_shows_the_phases_of_each_step(tmp_path, page):
    make_run(tmp_path, lr=1e-3)
    trace, at = Trace(tmp_path / "trace.json"), now()
    for kind, start, end, step in (("wait", 0, 0.5, 1), ("wait", 1, 1.25, 2)):
        trace.add("controller", [TimeSpan(kind, "train 0", at + start, at + end, {"step": step})])
    for kind, start, end in (("optimizer", 0.5, 0.7), ("forward_backward", 2, 3.5)):
        trace.add("trainer-0", [TimeSpan(kind, "rank 0", at + start, at + end, {})])
    trace.write()
    assert report([str(tmp_path)]) == 0
    await page.open((tmp_path / "report.html").as_uri())
    await unfold(page, "Time")
    for name, seconds in {"wait": [0.5, 0.25], "optimizer": [0.2], "other": [1 - 0.7, 2 - 1.75, 3, 4]}.items():
        (line,) = await lines_of(page, "Phases of a step", name=f"phase/{name}")
        whole_us = pytest.approx(seconds, abs=5e-6)  # a trace has whole microseconds
        assert line == ([*range(1, 1 + len(seconds))], whole_us), name


async def test_report_links_to_rollouts(pages, page):
    await page.open(pages[0])
    drops = await page.run(text_of("#drop-tables"))
    assert "rollout failed" in drops and ERROR in drops
    links = await page.run("[...document.querySelectorAll('#rollout-tables td a')].map((a) => a.href)")
    assert links[:2] == [f"{pages[1]}#group={g}&trajectory={t}" for g, t in ((1, 1), (9, 0))]
    assert links[4:6] == [f"{pages[1]}#step=4&group={g}&trajectory={t}" for g, t in ((2, 5), (1, 0))]
    await page.open(links[1])
    assert "PromptError: too long" in await page.run(text_of(".card.chosen"))
    await page.open(links[4])
    assert (await page.run(text_of(".card.chosen"))).startswith("#5")
    await page.open(f"{pages[1]}#step=99&group=1&trajectory=0")
    assert "step=99" in await page.run(text_of("#notes"))


async def test_report_finds_metrics_by_name_and_meaning_and_draws_them(pages, page):
    await page.open(pages[0], width=390)
    shown = "[...document.querySelectorAll('#metric-table tr[data-words]:not([hidden])')].map((r) => r.textContent)"
    everything = len(await page.run(shown))
    assert everything > len(METRICS)
    await page.run(given("metric-search", "global norm"))
    (found,) = await page.run(shown)
    assert found.startswith("grad_norm") and METRICS["grad_norm"].meaning in found
    await page.run("document.querySelector('#metric-table tr:not([hidden]) td.key button').click()")
    await page.until("document.querySelector('#metric-table .drawing')?.data?.length === 2")
    needed, window = await page.run(WIDTHS)
    assert needed <= window
    await page.run(given("metric-search", "validation/success"))
    assert len(await page.run(shown)) == 1
    await page.run(given("metric-search", ""))
    assert len(await page.run(shown)) == everything


# ---- rollouts


async def test_viewer_of_failed_rollouts_alone_is_not_empty(tmp_path, page):
    FailedRollouts(tmp_path / FOLDER, config=RecordConfig()).add(failed(9, 0, error="PromptError: x"), train_step=3)
    assert view([str(tmp_path)]) == 0
    await page.open((tmp_path / "rollouts.html").as_uri())
    assert "PromptError: x" in await page.run(text_of(".card.chosen"))


async def test_viewer_opens_with_the_newest_group_and_filters_by_error_reward_stop_reason_step_and_text(pages, page):
    await page.open(pages[1])
    assert "Step 6, group 3" in await page.run(text_of("#bar h2")), "the newest group"
    left, right = await page.run(
        "['#question', '.card.chosen'].map((s) => document.querySelector(s).getBoundingClientRect().toJSON())"
    )
    assert left["right"] <= right["left"] and abs(left["top"] - right["top"]) < 20
    assert "prompt of 3" in await page.run(text_of("#question"))
    assert (await page.run(texts_of("#list .row div:nth-child(2)")))[0] == "prompt of 3", "the list has questions too"
    await page.until(count_is(10))
    await page.run(chosen("error", "all"))
    await page.until(count_is(2))
    await page.run(chosen("error", "=PromptError"))
    await page.until(count_is(1))
    assert "PromptError: too long" in await page.run(text_of(".row"))
    for name, value, count in (
        ("text", "NO UNIT in", 1),
        ("reward_from", "1", 2),
        ("step_to", "2", 3),
        ("stop", "=error", 2),
    ):
        await page.run(chosen("error", ""))
        await page.run(chosen(name, value))
        await page.until(count_is(count))
        await page.run(chosen(name, ""))
        await page.until(count_is(10))


async def test_viewer_moves_by_keys(pages, page):
    await page.open(pages[1])
    here = "['step', 'group', 'trajectory', 'path'].map((name) => columns[name][chosen])"
    places = []
    for key in ("j", "k", "n", "j", "n", "p", "p"):
        await page.press(key)
        places.append(await page.run(here))
    assert places == [
        *([6, 3, 0, 1], [6, 3, 0, 0], [4, 1, 0, 0], [4, 1, 1, 0]),
        *([4, 2, 1, 0], [4, 1, 0, 0], [6, 3, 0, 0]),
    ]
    assert await page.run("location.hash") == "#step=6&group=3&trajectory=0"
    await page.press("/")
    assert await page.run("document.activeElement.name") == "text"
    await page.press("j")
    assert await page.run("$('filters').text.value") == "j", "a letter in a field is text"
    await page.press("Escape", "?")
    assert await page.run("$('keys').open")
    await page.press("Escape", "s")
    assert await page.run("!$('keys').open && document.querySelectorAll('.card').length") == 2, "the whole group"


async def test_viewer_shows_rewards_of_each_step_and_group(pages, page):
    await page.open(pages[1])
    bins = await page.run("columns_of_steps.map((c) => [c.first, c.rows, c.sum, c.bins])")
    assert bins == [
        [2, 3, 1.5, [1, 1, 0, 1, 0, 0, 0, 0]],
        [4, 3, 3.0, [1, 1, 0, 0, 0, 0, 0, 1]],
        [6, 2, 0.0, [2, 0, 0, 0, 0, 0, 0, 0]],
    ], "rewards 0 to 2.5 in eight ranges, without failed rollouts"
    await page.run("$('rewards').querySelector('canvas').dispatchEvent(new MouseEvent('click', {clientX: 20}))")
    await page.until(count_is(3))
    await page.open(f"{pages[1]}#step=2&group=0&trajectory=1")
    assert await page.run(texts_of("#members button")) == ["#0, policy  0", "#1, policy  0.5", "#2, policy  1"]
    assert await page.run(text_of("#members span")) == "mean 0.5, deviation 0.408"


async def test_viewer_opens_the_rollout_of_a_link_and_shows_its_tokens(pages, page):
    await page.open(f"{pages[1]}#step=4&group=1&trajectory=1")
    text = await page.run(text_of(".card.chosen"))
    assert text.startswith("#1") and ERROR in text and "said" in text
    await page.open(f"{pages[1]}#step=6&group=3&trajectory=0&path=1")
    assert (await page.run(text_of(".card.chosen"))).startswith("#0, path 1, critic")
    await page.run("document.querySelector('.card.chosen .show-tokens').click()")
    await page.until("document.querySelectorAll('.card.chosen [data-i]').length === 7")
    await page.open(f"{pages[1]}#step=2&group=0&trajectory=0")
    assert (await page.run(text_of(".card.chosen"))).startswith("#0")
    await page.press("t")
    await page.until("document.querySelectorAll('.card.chosen [data-i]').length === 5")
    await page.run("document.querySelector('.card.chosen [data-i=\"3\"]').click()")
    facts = await page.run(text_of("#token"))
    assert "share of the gradient12.5 % of the optimizer step" in facts
    assert "experts, layer 13, 7" in facts and "experts, layer 34, 300" in facts
    await page.run("document.querySelector('.card.chosen [data-i=\"4\"]').click()")
    assert "no row: the live router decides" in await page.run(text_of("#token"))
    colours = "document.querySelector('#bar select')"
    for name in await page.run(texts_of("#bar option")):
        await page.run(f"{colours}.value = {name!r}; {colours}.dispatchEvent(new Event('change'))")


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3?"},
]
OPENED = "<|im_start|>assistant\n<think>\n"
HARMONY = (
    "<|start|>system<|message|>be brief<|end|><|start|>user<|message|>2+2?<|end|><|start|>assistant<|channel|>final"
    "<|message|>4<|end|><|start|>user<|message|>and 3?<|end|>"
)
GEMMA = (
    "<bos><start_of_turn>system\nbe brief<end_of_turn>\n<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n"
    "4<end_of_turn>\n<start_of_turn>user\nand 3?<end_of_turn>\n<start_of_turn>model\n"
)


async def test_viewer_shows_roles_in_place_of_the_tokens_of_a_template(pages, page):
    await page.open(pages[1])
    rendered = {"harmony": HARMONY, "gemma": GEMMA}
    rendered["mixtral"] = build("mixtral").apply_chat_template(CHAT[1:], tokenize=False)
    for family in ("qwen", "glm", "deepseek", "llama", "olmo"):
        rendered[family] = build(family).apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    for family, text in rendered.items():
        parts = await page.run(f"messages_of({json.dumps(text)}, 'prompt')")
        ends = {"user": "/nothink"} if family == "glm" else {}
        expected = [[m["role"], m["content"] + ends.get(m["role"], "")] for m in CHAT]
        assert parts == (expected[1:] if family == "mixtral" else expected), family
    assert await page.run("messages_of('no template', 'prompt')") == [["prompt", "no template"]]


async def test_viewer_shows_reasoning_calls_and_replies_and_raw_text_on_demand(tmp_path, page):
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    turns = [
        {
            "text": f"let me see</think>\nI ask.\n{call}<|im_end|>",
            "reply": "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n" + OPENED,
            "tool_calls": [],
        },
        {"text": "two\n</think>\nIt is 2.<|im_end|>", "reply": "", "tool_calls": []},
    ]
    prompt = "<|im_start|>user\n1+1?<|im_end|>\n" + OPENED
    write(tmp_path, 2, [row(2, 0, 0) | {"prompt": prompt, "turns": turns}])
    assert view([str(tmp_path)]) == 0
    await page.open((tmp_path / "rollouts.html").as_uri())
    shown = await page.run(
        "[...document.querySelectorAll('.message')].map((e) => [e.classList[1], e.lastChild.innerText])"
    )
    assert [[role, text.split()] for role, text in shown] == [
        ["user", ["1+1?"]],
        ["reasoning", ["let", "me", "see"]],
        ["assistant", ["I", "ask."]],
        ["call", ["calculator", "expression:", "1+1"]],
        ["tool", ["2"]],
        ["reasoning", ["two"]],
        ["assistant", ["It", "is", "2."]],
    ]
    await page.press("r")
    assert await page.run(texts_of("pre.message")) == [prompt, turns[0]["text"], turns[0]["reply"], turns[1]["text"]]


async def test_hostile_texts_are_shown_as_texts(tmp_path, page):
    make_run(tmp_path, lr=1e-3)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"name": HOSTILE}))
    record_start(tmp_path, command=HOSTILE, train_step=2)
    text = HOSTILE.encode("utf-8", "replace").decode()
    turn = {"text": text, "reply": f"<|im_start|>tool\n{text}", "tool_calls": []}
    write(tmp_path, 8, [row(8, 8, 0) | {"prompt": text, "turns": [turn], "agent": text}])
    records = FailedRollouts(tmp_path / FOLDER, config=RecordConfig())
    records.add(failed(11, 0, error=HOSTILE), train_step=9)
    with (tmp_path / FOLDER / "failed-000009.jsonl").open("a") as file:
        file.write(json.dumps(asdict(failed(12, 0, error=HOSTILE))) + "\n")
    assert report([str(tmp_path)]) == 0 and view([str(tmp_path)]) == 0
    for name, selectors in (
        ("report.html", ("#starts", "#drop-tables", "#config-table")),
        ("rollouts.html#step=8&group=8&trajectory=0", ("#question", ".card .message:nth-of-type(4)", "#list")),
        ("rollouts.html#group=12&trajectory=0", (".card.chosen .failure",)),
    ):
        await page.open(f"{tmp_path.as_uri()}/{name}")
        for selector in selectors:
            assert "<img src=x onerror=" in await page.run(text_of(selector)), (name, selector)
        assert await page.run("document.images.length") == 0 and "broken" not in await page.run("document.title")


async def test_viewer_of_ten_thousand_rollouts_says_what_it_leaves_out(tmp_path, page, monkeypatch):
    monkeypatch.setattr(viewer, "MAX_TOKEN_BYTES", 50_000)
    for step in range(1, 12):
        write(tmp_path, step, [row(step, 1000 * step + n, 0, tokens=3) for n in range(1000)])
    assert view([str(tmp_path)]) == 0
    await page.open((tmp_path / "rollouts.html").as_uri())
    assert await page.run(count_is("10,000", of="10,000"))
    notes = await page.run(text_of("#notes"))
    assert "newest 10000 rollouts; 1 older steps" in notes and "not their tokens" in notes
    assert await page.run("document.querySelectorAll('.row').length") < 100
    await page.run(chosen("text", "prompt of 2999"))
    await page.until(count_is(1, of="10,000"))
    await page.press("j", "t")
    await page.until("document.querySelector('.card.chosen .tokens').textContent.includes('the page has no tokens')")
