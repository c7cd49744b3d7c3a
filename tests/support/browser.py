"""A real browser without a screen: Chromium, driven over its own pipe (DevTools protocol), one page at a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
MISSING = "" if CHROMIUM else "no Chromium here (apt-get install chromium)"
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root has not
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-prefers-reduced-motion",
    "--remote-debugging-pipe",
)


class Browser:
    """`folder`: an empty one, for its profile. `errors`: what pages have thrown, and what their policy refused."""

    def __init__(self, folder: Path) -> None:
        there, commands = os.pipe()
        answers, back = os.pipe()
        # It reads commands from its descriptor 3, and answers on 4: above those that the pipes have here.
        script = f'exec 3<&{there} 4>&{back}; exec "$@"'
        flags = [*_FLAGS, f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", CHROMIUM, *flags],
            pass_fds=(there, back),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(there)
        os.close(back)
        self._commands, self._answers = os.fdopen(commands, "wb", 0), os.fdopen(answers, "rb", 0)
        self._rest, self._count, self._session = b"", 0, ""
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._commands.close()  # it ends then
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        self._answers.close()

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, as JSON has it."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """Returns what a person reads there; "" where nothing is."""
        return str(self.evaluate(f"(document.querySelector({json.dumps(selector)}) ?? {{}}).innerText ?? ''"))

    def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited in vain; the page: {self.text()}; its errors: {self.errors}"
            time.sleep(0.1)

    def _call(self, method: str, **parameters: Any) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._count:
                assert "error" not in found, f"{method}: {found}"
                return found["result"]
            if found.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(found["params"]["exceptionDetails"]))
            elif found.get("method") == "Log.entryAdded" and found["params"]["entry"]["level"] == "error":
                self.errors.append(json.dumps(found["params"]["entry"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = self._answers.read(1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
