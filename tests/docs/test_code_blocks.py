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


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as forges make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name_of)
def test_the_python_blocks_of_a_page_run(page, tmp_path):
    script = []
    for title, code in blocks(page.read_text()):
        if title is not None:
            (tmp_path / title).write_text(code)
        script.append(code if title is None else f"import {title.removesuffix('.py')}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    (tmp_path / "script.py").write_text("".join(script))
    command = [sys.executable, "-W", "error", "script.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if "SandboxError" in ran.stderr:
        pytest.skip("programs cannot be isolated on this machine")
    assert ran.returncode == 0, ran.stderr


def test_the_pages_with_python_blocks_are_found():
    assert {"README.md", "docs/guides/task.md", "docs/guides/tool.md"} <= set(map(name_of, WITH_BLOCKS))


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


def test_the_navigation_has_every_page_once():
    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    sections = [{"": [entry]} if isinstance(entry, str) else entry for entry in entries]
    names = [name for section in sections for pages in section.values() for name in pages]
    assert sorted(names) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md"))
