"""Report and rollouts of a run in a real browser: they fit the window, log no error, and filters and links work."""

import pytest
import yaml

from async_rl.files.rollouts import FOLDER, FailedRollouts, RecordConfig
from async_rl.metrics.recorder import Recorder, StepRecord
from async_rl.metrics.registry import METRICS, of_layer
from async_rl.report import main as report
from async_rl.view import main as view
from tests.async_rl.metrics.test_observe import Null, validated
from tests.async_rl.metrics.test_viewer import failed, row, write
from tests.helpers.chromium import CHROMIUM, browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH")

LONG = "a/very/long/path/without/any/space/" * 8
ERROR = f"RewardError: no unit in '{'7' * 200}' (/a/{LONG}own.py:7 in score)"


def make_run(directory, *, lr, shift=0.0):
    """A run of four steps with all metrics, two rounds of validation, a dropped group and recorded rollouts."""
    recorder = Recorder(directory, console=Null())
    for step in range(1, 5):
        metrics = {key: float(step + shift) for key in METRICS} | {"train_step": step}
        metrics |= {of_layer("routing/overlap", layer): 0.1 * layer for layer in (1, 3)} | {"info/own": -3.5}
        recorder.step(StepRecord(metrics=metrics, staleness_tokens={0: 10, 2: 30}))
    for step in (0, 4):
        recorder.validation(step, validated(0.25 + step / 10))
    reason = f"rollout failed: prompt 3: {ERROR}"
    recorder.ledger([{"group": 3, "outcome": "dropped", "reason": reason, "tokens": 12}])
    recorder.close()
    (directory / "config.yaml").write_text(yaml.safe_dump({"optimizer": {"lr": lr}, "output_dir": LONG}))
    write(directory, 2, [row(2, 0, n) for n in range(3)])
    write(directory, 4, [row(4, 1, 0), row(4, 1, 1, tokens=0), row(4, 2, 1, tokens=9), row(4, 2, 5)])
    write(directory, 6, [row(6, 3, 0), row(6, 3, 0, tokens=7, path=1, agent="critic")])
    records = FailedRollouts(directory / FOLDER, config=RecordConfig())
    records.add(failed(1, 1, error=ERROR), train_step=3)
    records.add(failed(9, 0, error="PromptError: too long"), train_step=3)


@pytest.fixture
def pages(tmp_path):
    """Addresses of the report of two runs and of the rollouts of the first."""
    for name, lr in (("first", 1e-3), ("second", 2e-3)):
        make_run(tmp_path / name, lr=lr, shift=lr)
    assert report([str(tmp_path / "first"), str(tmp_path / "second")]) == 0 and view([str(tmp_path / "first")]) == 0
    return [(tmp_path / "first" / name).as_uri() for name in ("report.html", "rollouts.html")]


@pytest.fixture
async def page(tmp_path):
    async with browser(tmp_path / "profile") as page:
        yield page
        assert page.errors == []


WIDTHS = "[document.documentElement.scrollWidth, innerWidth]"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def chosen(select, value):
    """Script: choose a value of a field of the filters."""
    return (
        f"document.querySelector('[name={select}]').value = {value!r};"
        "document.getElementById('filters').dispatchEvent(new Event('input'))"
    )


def count_is(count):
    return f"document.getElementById('count').textContent.startsWith('{count} of 10')"


async def test_pages_fit_narrow_and_wide_windows_in_light_and_dark(pages, page):
    colours = set()
    for url in (*pages, f"{pages[1]}#step=4&group=1&trajectory=1"):
        for width in (390, 1280):
            for dark in (False, True):
                await page.open(url, width=width, dark=dark)
                needed, window = await page.run(WIDTHS)
                assert needed <= window == width, url
                colours.add((dark, await page.run(BACKGROUND)))
    assert len(colours) == 2, "one background for light and one for dark"


async def test_viewer_filters_by_error_and_text(pages, page):
    await page.open(pages[1])
    await page.until(count_is(10))
    await page.run(chosen("error", "all"))
    await page.until(count_is(2))
    options = await page.run("[...document.querySelector('[name=error]').options].map((o) => o.text)")
    await page.run(chosen("error", str(options.index("PromptError") - 2)))
    await page.until(count_is(1))
    assert "PromptError: too long" in await page.run("document.querySelector('.row').textContent")
    await page.run(chosen("error", ""))
    await page.run(chosen("text", "NO UNIT in"))
    await page.until(count_is(1))


async def test_viewer_opens_the_rollout_of_a_link_and_shows_its_tokens(pages, page):
    await page.open(f"{pages[1]}#step=4&group=1&trajectory=1")
    text = await page.run("document.querySelector('.card.chosen').textContent")
    assert text.startswith("#1") and ERROR in text and "said" in text
    await page.open(f"{pages[1]}#step=6&group=3&trajectory=0&path=1")
    assert (await page.run("document.querySelector('.card.chosen').textContent")).startswith("#0, path 1, critic")
    await page.run("document.querySelector('.card.chosen .show-tokens').click()")
    await page.until("document.querySelectorAll('.card.chosen [data-i]').length === 7")
    await page.open(f"{pages[1]}#step=2&group=0&trajectory=0")
    assert (await page.run("document.querySelector('.card.chosen').textContent")).startswith("#0")
    await page.run("document.querySelector('.card.chosen .show-tokens').click()")
    await page.until("document.querySelectorAll('.card.chosen [data-i]').length === 5")
    await page.run("document.querySelector('.card.chosen [data-i=\"3\"]').click()")
    facts = await page.run("document.getElementById('token').textContent")
    assert "share of the gradient12.5 % of the optimizer step" in facts
    assert "experts, layer 13, 7" in facts and "experts, layer 34, 300" in facts
    await page.run("document.querySelector('.card.chosen [data-i=\"4\"]').click()")
    assert "no row: the live router decides" in await page.run("document.getElementById('token').textContent")
    for name in await page.run("[...document.querySelector('#bar select').options].map((o) => o.text)"):
        await page.run(
            f"document.querySelector('#bar select').value = {name!r};"
            "document.querySelector('#bar select').dispatchEvent(new Event('change'))"
        )


async def test_report_shows_curves_and_differences_and_links_to_rollouts(pages, page):
    await page.open(pages[0])
    assert await page.run("document.querySelectorAll('.plot svg').length") > 15
    facts = await page.run("[...document.querySelectorAll('#summary tr:first-child td')].map((e) => e.textContent)")
    assert facts[0] == "first" and facts[5] == "3", "1, 2, 3 and 4 tokens/s for as many seconds"
    assert "optimizer.lr" in await page.run("document.getElementById('differences').textContent")
    assert "output_dir" not in await page.run("document.getElementById('differences').textContent")
    drops = await page.run("document.getElementById('drop-tables').textContent")
    assert "rollout failed" in drops and ERROR in drops
    plot = "document.querySelector('[data-title=\"Held-out success\"]')"
    await page.run(
        f"{{ const at = {plot}.querySelector('svg'), box = at.getBoundingClientRect();"
        "at.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 12, clientY: box.top + 20})) }"
    )
    tip = await page.run(f"{plot}.querySelector('.tip').textContent")
    assert "train step 4" in tip and "first 0.65" in tip
    await page.run("document.querySelector('#runs button').click()")
    assert await page.run(f"{plot}.querySelectorAll('path').length") == 1
    lags = "document.querySelector('[data-title^=\"Mismatch by staleness\"] svg').textContent"
    assert [label in await page.run(lags) for label in ("0, mixed", "3+")] == [True, True]
    links = await page.run("[...document.querySelectorAll('#rollout-tables a')].map((a) => a.href)")
    assert links[:2] == [f"{pages[1]}#group={g}&trajectory={t}" for g, t in ((1, 1), (9, 0))]
    assert links[4:6] == [f"{pages[1]}#step=4&group={g}&trajectory={t}" for g, t in ((2, 5), (1, 0))]
    await page.open(links[1])
    assert "PromptError: too long" in await page.run("document.querySelector('.card.chosen').textContent")
    await page.open(links[4])
    assert (await page.run("document.querySelector('.card.chosen').textContent")).startswith("#5")


async def test_report_finds_metrics_by_name_and_meaning_and_draws_them(pages, page):
    await page.open(pages[0], width=390)
    shown = "[...document.querySelectorAll('#metric-table tr[data-words]:not([hidden])')].map((r) => r.textContent)"
    search = (
        "document.getElementById('metric-search').value = {!r};"
        "document.getElementById('metric-search').dispatchEvent(new Event('input'))"
    )
    everything = len(await page.run(shown))
    assert everything > len(METRICS)
    await page.run(search.format("global norm"))
    (found,) = await page.run(shown)
    assert found.startswith("grad_norm") and METRICS["grad_norm"].meaning in found
    await page.run("document.querySelector('#metric-table tr:not([hidden]) td.key button').click()")
    assert await page.run("document.querySelectorAll('#metric-table .plot path').length") == 2
    needed, window = await page.run(WIDTHS)
    assert needed <= window
    await page.run(search.format("validation/success"))
    assert len(await page.run(shown)) == 1
    await page.run(search.format(""))
    assert len(await page.run(shown)) == everything
