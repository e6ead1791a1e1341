"""MCP servers of others as tools; `make setup-agents` installs them."""

import http.server
import json
import subprocess
import threading

import pytest

from agent_loop.tools.mcp import McpServer
from message_queue.errors import ToolError
from tests.agents.test_agents import PYTHON

BIN = PYTHON.parent
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="the servers are not installed (make setup-agents)")


async def call(server: McpServer, name: str, arguments: dict[str, object]) -> str:
    async with server.opened(None, timeout_s=60) as tools:
        (tool,) = [each for each in tools if each.name == name]
        return await tool(arguments)


async def test_server_of_time_converts():
    server = McpServer(str(BIN / "mcp-server-time"), "--local-timezone", "UTC")
    asked = {"source_timezone": "UTC", "time": "10:00", "target_timezone": "Asia/Tokyo"}
    assert json.loads(await call(server, "convert_time", asked))["target"]["datetime"].endswith("T19:00:00+09:00")


@pytest.fixture
def repository(tmp_path):
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "a commit to be found"], check=True)
    return str(tmp_path)


async def test_server_of_git_shows_the_log(repository):
    server = McpServer(str(BIN / "mcp-server-git"), "--repository", repository)
    assert "a commit to be found" in await call(server, "git_log", {"repo_path": repository})


class Page(http.server.BaseHTTPRequestHandler):
    """One page for each path, and no robots.txt."""

    def do_GET(self):
        self.send_response(404 if self.path == "/robots.txt" else 200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(f"page of {self.path}".encode())

    def log_message(self, format, *args):
        pass


async def test_server_of_pages_fetches():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{pages.server_port}/news"
        server = str(BIN / "mcp-server-fetch")
        with pytest.raises(ToolError, match="not a public address"):
            await call(McpServer(server), "fetch", {"url": url})
        found = await call(McpServer(server, "--allow-private-ips"), "fetch", {"url": url})
        pages.shutdown()
    assert "page of /news" in found
