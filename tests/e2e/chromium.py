"""Chromium: one headless page, driven over the DevTools pipe (NUL-separated JSON on descriptors 3 and 4).

The browser is Debian's; the protocol needs nothing but the standard library, so there is no driver to install.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"Enter": 13, "Escape": 27, "ArrowUp": 38}


class Chromium:
    def __init__(self, profile: Path, *, width: int = 1280, height: int = 860) -> None:
        path = next(filter(None, map(shutil.which, NAMES)), None)
        if path is None:
            assert not os.environ.get("CI"), "chromium is missing; scripts/setup installs it"
            pytest.skip("no chromium here; scripts/test installs it where it may")
        self.pid, self._out, self._in = _spawn(path, [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"])
        self._buffer = b""
        self._calls = 0
        self._session: str | None = None
        self.complaints: list[str] = []  # uncaught exceptions and console errors, of every page opened
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._out)  # the browser leaves when its pipe closes
        deadline = time.monotonic() + 10
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.05)
        os.close(self._in)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._calls:
                assert "error" not in reply, f"{method}: {reply['error']}"
                result: dict[str, Any] = reply["result"]
                return result
            self._notice(reply)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, f"{expression}: {reply['exceptionDetails']}"
        return reply["result"].get("value")

    def wait(self, condition: str, seconds: float = 30.0) -> Any:
        """Until the JavaScript condition is truthy; its value, or True where that is a node."""
        value = f"(value => value instanceof Node || value)({condition})"
        return self.until(lambda: self.js(value), condition, seconds)

    def until(self, condition: Callable[[], Any], name: str, seconds: float = 30.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {seconds:g} s for: {name}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """A real press in the middle of the element: it fails where a person's would, under an overlay for instance."""
        box = self.js(
            "(e => { e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2] }})(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Replaces what the field holds."""
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self.js("document.activeElement.select()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            self.js("document.execCommand('delete')")

    def press(self, key: str) -> None:
        extra = {"text": "\r"} if key == "Enter" else {}
        code = KEYS.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _read(self, seconds: float = 30.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser said nothing for {seconds:g} s"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has gone"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _notice(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


def _spawn(path: str, argv: list[str]) -> tuple[int, int, int]:
    """The process id, and our ends of its pipe: to write, to read."""
    child_in, our_out = os.pipe()
    our_in, child_out = os.pipe()
    # Above 10, so that placing one on 3 or 4 cannot overwrite the other.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (child_in, child_out)]
    null = os.open(os.devnull, os.O_RDWR)
    places = [*zip(high, (3, 4), strict=True), (null, 0), (null, 1), (null, 2)]
    actions = [(os.POSIX_SPAWN_DUP2, fd, place) for fd, place in places]
    pid = os.posix_spawn(path, argv, os.environ, file_actions=actions)
    for fd in (child_in, child_out, null, *high):
        os.close(fd)
    return pid, our_out, our_in
