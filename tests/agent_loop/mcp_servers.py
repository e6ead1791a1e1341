"""MCP servers of the tests: `stdio` or `http SOCKET` with the library, `bare KIND` without."""

import json
import os
import sys
import time

HUGE = 3_000_000  # characters


def full_server():
    import asyncio

    from mcp.server import MCPServer
    from mcp.server.mcpserver import Context, Image

    server = MCPServer("full", log_level="ERROR")
    totals = {}

    def session(context):
        return (context.headers or {}).get("mcp-session-id")

    @server.tool()
    async def add(x: int, ctx: Context, after_s: float = 0.0) -> int:
        """Adds to the sum of the session."""
        await asyncio.sleep(after_s)
        totals[session(ctx)] = totals.get(session(ctx), 0) + x
        return totals[session(ctx)]

    @server.tool()
    def show(kind: str):
        """Shows something."""
        shown = {"image": Image(data=b"pixels", format="png"), "huge": "x" * HUGE}
        return shown[kind]

    @server.tool()
    def fail() -> str:
        """Fails."""
        from mcp.server.mcpserver.exceptions import ToolError

        raise ToolError("no such row")

    @server.tool()
    async def hang() -> str:
        """Gives no answer."""
        await asyncio.sleep(1000)
        return ""

    @server.tool()
    def variable(name: str) -> str:
        """Reads a variable."""
        return os.environ.get(name, "absent")

    @server.tool()
    def die() -> str:
        """Ends the server."""
        os.write(2, b"last words")
        os._exit(3)

    return server


def bare_server(kind):
    """Answers by hand; misbehaves as `kind` says."""
    tool = {"name": "tool", "description": "Answers.", "inputSchema": {"type": "object", "properties": {}}}
    initialized = {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "bare", "version": "1"},
    }
    if kind == "stubborn":  # neither the end of its input nor a signal that can be caught ends it
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.fork()
    if kind == "noisy":
        os.write(1, b"starting\n" * 100)
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "id" not in request:
            continue
        result = {"initialize": initialized, "tools/list": {"tools": [tool]}}.get(request["method"])
        if request["method"] == "tools/call":
            while kind == "floods":
                os.write(1, b"x" * 999 + b"\n")
            while kind == "line without end":
                os.write(1, b"x" * 9999)
            result = {"content": [{"type": "text", "text": str(os.getpid())}]}
        known = {"result": result} if result else {"error": {"code": -32601, "message": "unknown"}}
        os.write(1, f"{json.dumps({'jsonrpc': '2.0', 'id': request['id'], **known})}\n".encode())
    while kind == "stubborn":
        time.sleep(1000)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bare", kind]:
            bare_server(kind)
        case ["stdio"]:
            full_server().run("stdio")
        case ["http", number]:
            import uvicorn

            uvicorn.run(full_server().streamable_http_app(), fd=int(number), log_level="error")
