"""Hook of mkdocs: links to files outside `docs` work in the repository; the site shows their text only."""

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace the links that leave the folder by their text."""
    folder = posixpath.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        leaves = posixpath.normpath(posixpath.join(folder, link[2])).startswith("..")
        return link[1] if leaves else link[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)]+)\)", shown, markdown)
