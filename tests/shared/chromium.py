"""A real Chromium without a screen, driven over its debugging protocol: open, evaluate, picture."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import aiohttp

PROGRAM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
MISSING = "Chromium is not installed (Debian: apt-get install chromium)"
_START_S = 60.0


class Browser:
    """One page of a browser; an asynchronous context that leaves no process and no folder."""

    def __init__(self, width=1440, height=900, *, dark=False, mobile=False):
        self._shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self._dark = dark
        self._numbers = itertools.count(1)
        self._answers = {}
        self.problems = []

    async def __aenter__(self):
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        flags = ["--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                 "--remote-debugging-port=0", f"--user-data-dir={self._profile}",
                 "--disable-background-networking", "--disable-component-update"]  # fmt: skip
        if os.getuid() == 0:
            flags.append("--no-sandbox")
        silent = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
        self._process = await asyncio.create_subprocess_exec(
            PROGRAM, *flags, "about:blank", start_new_session=True, **silent
        )
        self._http = aiohttp.ClientSession()
        port = await self._port()
        async with self._http.get(f"http://127.0.0.1:{port}/json/list") as answer:
            [page] = [each for each in await answer.json() if each["type"] == "page"]
        self._socket = await self._http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        self._reading = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setDeviceMetricsOverride", **self._shape)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    async def __aexit__(self, *_):
        self._reading.cancel()
        await self._socket.close()
        await self._http.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    async def _port(self):
        told = Path(self._profile) / "DevToolsActivePort"
        deadline_s = time.monotonic() + _START_S
        while not (told.exists() and told.read_text().strip()):
            assert time.monotonic() < deadline_s, "Chromium did not start"
            await asyncio.sleep(0.05)
        return told.read_text().split()[0]

    async def _read(self):
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                details = told["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", str(details)))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.problems.append(told["params"]["entry"]["text"])

    async def call(self, method, **params):
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await answer
        assert "error" not in told, told
        return told["result"]

    async def open(self, url):
        await self.call("Page.navigate", url=url)

    async def run(self, script):
        """Evaluate an expression, which may be a promise, and return its value."""
        told = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, script, deadline_s=60.0):
        """Wait until an expression is true."""
        end_s = time.monotonic() + deadline_s
        while not await self.run(f"Boolean({script})"):
            assert time.monotonic() < end_s, f"not within {deadline_s} s: {script}"
            await asyncio.sleep(0.05)

    async def key(self, text):
        """Press one key."""
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": text}
            if kind == "keyDown" and len(text) == 1:
                event["text"] = text
            await self.call("Input.dispatchKeyEvent", **event)

    async def picture(self, path, *, whole=False):
        """Write a picture of what is seen, or of the whole page."""
        clip = {}
        if whole:
            size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
            clip = {"clip": {**size, "scale": 1}, "captureBeyondViewport": True}
        told = await self.call("Page.captureScreenshot", format="png", **clip)
        await asyncio.to_thread(Path(path).write_bytes, base64.b64decode(told["data"]))
