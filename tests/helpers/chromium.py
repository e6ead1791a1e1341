"""A page in headless Chromium, driven over the DevTools protocol."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_CODES = {"Escape": 27}
TIMEOUT_S = 120.0  # of a busy machine; a page that hangs fails after it


class Page:
    """A tab.

    Attributes:
        errors: texts of the exceptions, console errors and failed loads since the start.
        requests: addresses of everything that was loaded, the pages included.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    return message["result"]
                self._note(message)

    async def run(self, script: str) -> Any:
        """Value of an expression, or of its promise."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, condition: str) -> None:
        """Return once an expression is true in the page."""
        look = f"() => (({condition}) ? done(true) : setTimeout(look, 5))"
        await self.run(f"new Promise((done) => {{ const look = {look}; look(); }})")

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a page, until it has set `document.body.dataset.ready`."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url="about:blank")  # else another fragment of the same page is no new load
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.body && document.body.dataset.ready")

    async def press(self, *keys: str) -> None:
        """Press and release keys, each by its name or character."""
        for key in keys:
            text: dict[str, Any] = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": _CODES[key]}
            await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the left button at a place of the window, move and release it at another one."""
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        for kind, (x, y) in (("Pressed", start), ("Moved", middle), ("Moved", end), ("Released", end)):
            count = 0 if kind == "Moved" else 1
            await self.call(
                "Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, button="left", buttons=1, clickCount=count
            )

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] == "error":
                self.errors.append(str(parameters["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])
            case _:
                pass


@asynccontextmanager
async def browser(profile: Path) -> AsyncGenerator[Page]:
    """A tab of a Chromium that ends with the block.

    Args:
        profile: folder for its files.
    """
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *flags,
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        address = await _address(process)
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://{address}/json/new") as answer:
                target = await answer.json()
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Runtime", "Log", "Page", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _address(process: asyncio.subprocess.Process) -> str:
    """host:port of the protocol, as Chromium prints it."""
    assert process.stderr is not None
    async with asyncio.timeout(TIMEOUT_S):
        async for line in process.stderr:
            _, found, url = line.decode().partition("DevTools listening on ws://")
            if found:
                return url.partition("/")[0]
    raise RuntimeError(f"Chromium ended with {await process.wait()} before it listened")
