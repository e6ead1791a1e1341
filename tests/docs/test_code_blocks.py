"""Python blocks of the documentation run; links and paths in it exist; a reader meets the words first."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, RECIPES, ROOT, blocks, links, name_of, paths

WITH_BLOCKS = [page for page in PAGES if blocks(page.read_text())]
NOT_RUN: dict[str, int] = {}


def run_blocks(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Write the blocks with a title as files into `folder`; then import these and run the others there, in order."""
    script = []
    for block in blocks(text):
        if block.run and block.title:
            (folder / block.title).write_text(block.code)
            script.append(f"import {block.title.removesuffix('.py')}\n")
        elif block.run:
            script.append(block.code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    (folder / "script.py").write_text("".join(script))
    return subprocess.run(
        [sys.executable, "-W", "error", "script.py"], cwd=folder, env=environment, capture_output=True, text=True
    )


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as forges make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name_of)
def test_the_python_blocks_of_a_page_run(page, tmp_path):
    ran = run_blocks(page.read_text(), tmp_path)
    if "SandboxError" in ran.stderr:
        pytest.skip("programs cannot be isolated on this machine")
    assert ran.returncode == 0, ran.stderr


def test_pages_have_python_blocks_and_all_but_the_named_ones_are_run():
    assert {"README.md", "docs/guides/task.md", "docs/guides/tool.md"} <= set(map(name_of, WITH_BLOCKS))
    left_out = {name_of(page): sum(not block.run for block in blocks(page.read_text())) for page in WITH_BLOCKS}
    assert {page: count for page, count in left_out.items() if count} == NOT_RUN


def test_a_block_that_fails_is_noticed(tmp_path):
    assert run_blocks("text\n```python\nassert True\n```\n", tmp_path).returncode == 0
    assert run_blocks('text\n```python title="a.py"\nx = 1\n```\n\n```py\nassert a.x == 2\n```\n', tmp_path).returncode


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=name_of)
def test_the_links_and_paths_of_a_page_exist(page):
    text = page.read_text()
    missing = [path for path in paths(text) if not (ROOT / path).exists()]
    for link in links(text):
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(link)
    assert not missing


def test_the_first_page_opens_with_the_vocabulary():
    title, empty, _, _, *rows = (ROOT / "docs" / "index.md").read_text().splitlines()
    words = [row.split(" | ")[0].strip("| ") for row in rows[: rows.index("")]]
    assert (title, empty) == ("# async_rl", "")
    assert words == ["prompt", "group", "trajectory", "turn", "segment", "row", "version", "staleness"]


def test_the_navigation_has_every_page_once():
    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    sections = [{"": [entry]} if isinstance(entry, str) else entry for entry in entries]
    names = [name for section in sections for pages in section.values() for name in pages]
    assert sorted(names) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md"))
