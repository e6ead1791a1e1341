"""`async_rl.view --live`: what the server answers, and pages that renew themselves and keep what the reader chose."""

import http.client
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from async_rl.metrics.pages import serve
from async_rl.metrics.recorder import Recorder
from async_rl.view import main
from tests.async_rl.metrics.test_pages import STEPS, count_is, drawing, make_run, record_steps
from tests.async_rl.metrics.test_viewer import row, write
from tests.helpers.chromium import CHROMIUM, browser


@contextmanager
def command(directory):
    """Addresses of the two pages, served by the command."""
    arguments = [sys.executable, "-m", "async_rl.view", "--live", "--port", "0", str(directory)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield [process.stdout.readline().strip() for _ in range(2)]
        finally:
            process.terminate()


@contextmanager
def served(directory, pages, *, host="127.0.0.1"):
    with serve(directory, pages, host=host, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def get(port, path, **headers):
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def test_server_makes_a_page_anew_only_if_files_of_the_run_changed(tmp_path):
    made = []

    def page():
        made.append(None)
        return f'<html lang="en">{len(made)}'

    with served(tmp_path, {"/report.html": page}) as port:
        status, _, text = get(port, "/report.html")
        tag = re.search('data-live="(.+?)"', text)[1]
        assert status == 200 and text.endswith("1")
        assert get(port, "/report.html", **{"If-None-Match": tag})[::2] == (304, "")
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        while (found := get(port, "/report.html", **{"If-None-Match": tag}))[0] == 304:
            pass  # at most a fifth of the time is spent on making pages
        assert found[0] == 200 and found[2].endswith("2") and len(made) == 2
        assert get(port, "/")[0] == 302 and get(port, "/")[1]["Location"] == "/report.html"


def test_server_has_no_other_file_and_no_foreign_host(tmp_path):
    (tmp_path / "config.yaml").write_text("secret")
    with served(tmp_path, {"/report.html": lambda: "<html >"}) as port:
        for path in ("/config.yaml", "/../config.yaml", "/report.html/../config.yaml"):
            assert get(port, path)[0] == 404
        assert get(port, "/report.html", Host="evil.example:80")[0] == 403
        assert get(port, "/report.html", Host=f"localhost:{port}")[0] == 200


def test_server_shows_why_a_page_cannot_be_made(tmp_path):
    def page():
        raise ValueError("metrics.jsonl line 3 is damaged")

    with served(tmp_path, {"/report.html": page}) as port:
        assert get(port, "/report.html")[::2] == (503, "metrics.jsonl line 3 is damaged")


def test_live_of_no_run_is_refused(tmp_path, capsys):
    assert main(["--live", "--port", "0", str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH")
async def test_pages_of_a_living_run_renew_and_keep_what_the_reader_chose(tmp_path):
    run = tmp_path / "run"
    make_run(run, lr=1e-3)
    write(run, 8, [row(8, group, n) for group in range(20, 40) for n in range(2)])
    files = {path.name for path in run.iterdir()}
    with command(run) as addresses:
        async with browser(tmp_path / "profile") as page:
            await page.open(addresses[0])
            await page.run(
                "$('smooth').value = 0.5; $('smooth').oninput(); $('axis').value = 'tokens'; $('axis').onchange();"
                "document.querySelector('[data-topic=Loss]').open = true; scrollTo(0, 300);"
                f"Plotly.relayout({drawing('Reward')}, {{'xaxis.range[0]': 1, 'xaxis.range[1]': 3}}); void 0"
            )
            recorder = Recorder(run, console=None)
            record_steps(recorder, range(STEPS + 1, STEPS + 3))
            recorder.close()
            await page.until(f"{drawing('Throughput')}.data[1].x.length === {STEPS + 2}")
            await page.until(f"{drawing('Loss')}.data[1].x.length === {STEPS + 2}")
            kept = f"[...{drawing('Reward')}.layout.xaxis.range, state.smooth, state.axis, scrollY]"
            assert await page.run(kept) == [1, 3, 0.5, "tokens", 300]
            assert await page.run("$('live').textContent") == "live"

            await page.open(addresses[1])
            await page.run(
                "$('list').scrollTop = 30 * ROW; pick(found[34]); turn('raw'); $('list').scrollTop = 30 * ROW"
            )
            key, top = await page.run("[key_of(chosen), key_of(found[30])]")
            write(run, 10, [row(10, 50, n) for n in range(3)])
            await page.until(count_is(53, of=53))
            await page.until("document.querySelector('.card.chosen')")
            kept = "[key_of(chosen), key_of(found[Math.floor($('list').scrollTop / ROW)])]"
            assert await page.run(kept) == [key, top]
            assert await page.run("state.raw && document.querySelector('#bar h2').textContent") == "Step 8, group 37"
            await page.open(addresses[1].partition("#")[0])
            write(run, 12, [row(12, 60, 0)])
            await page.until("document.querySelector('#bar h2').textContent === 'Step 12, group 60'")
            assert page.errors == [], "a reader who chose nothing sees the newest group"
            assert all(url.startswith(("about:", "data:", addresses[0].rpartition("/")[0])) for url in page.requests)
    assert {path.name for path in run.iterdir()} == files, "only the run writes to its directory"
