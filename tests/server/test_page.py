"""The chat page in a real browser: headless Chromium, driven over pipes."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_parts import TIMEOUT, until
from http_parts import Served, play

from jetserve.types import FinishReason

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")


class Browser:
    """One page, spoken to in Chromium's DevTools protocol: JSON messages, each ended by a zero byte."""

    def __init__(self, executable: str, folder: Path) -> None:
        read_commands, self._commands = os.pipe()
        self._messages, write_messages = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        # The browser's ends are its descriptors 3 and 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read_commands} 4>&{write_messages}', "bash", executable, *flags],
            pass_fds=(read_commands, write_messages),
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_messages)
        self._ids = itertools.count(1)
        self._held = b""
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            data = os.read(self._messages, 1 << 16)
            assert data, "the browser has ended"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script: str) -> Any:
        """The value of some JavaScript."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of some JavaScript once it is true."""
        end = time.monotonic() + TIMEOUT
        while not (value := self.run(script)):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"))
            time.sleep(0.02)
        return value

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && !!document.getElementById('message')")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._messages)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium is installed, and CHROMIUM names none")
    with contextlib.closing(Browser(found, tmp_path / "profile")) as browser:
        yield browser


def show(browser: Browser, scene: Callable[[Browser, Served], None], **settings: Any) -> None:
    """Plays a scene in the page of a server."""

    async def main(served: Served) -> None:
        await asyncio.to_thread(browser.open, served.server.url)
        await asyncio.to_thread(scene, browser, served)
        await until(lambda: served.engine.stats().pages_used == 0)
        assert browser.errors == []

    play(main, **settings)


LAST_NOTE = "[...document.querySelectorAll('.assistant .note')].at(-1)?.textContent"
TEXTS = "[...document.querySelectorAll('.text')].map(e => e.textContent)"


def test_a_conversation(browser: Browser) -> None:
    def scene(browser: Browser, served: Served) -> None:
        browser.wait("/running.*waiting.*KV cache/.test(document.getElementById('state').textContent)")
        browser.run("document.getElementById('max_tokens').value = 20")
        browser.type("<img src=x onerror=alert(1)>")
        browser.press("Enter")
        note = browser.wait(f"/tokens ·.*first token after \\d+ ms/.test({LAST_NOTE}) && {LAST_NOTE}")
        question, answer = browser.run(TEXTS)
        assert question == "<img src=x onerror=alert(1)>"
        assert answer
        assert browser.run("document.querySelectorAll('#log img, #log script').length") == 0
        assert "tokens/s" in note or note.startswith("1 tokens")
        # A second turn sends the first along, and a reload shows both again.
        browser.type("And then?")
        browser.press("Enter")
        browser.wait(f"{TEXTS}.length === 4 && /first token after/.test({LAST_NOTE}) && !stopper")
        before = browser.run(TEXTS)
        browser.call("Page.reload")
        browser.wait(f"document.readyState === 'complete' && {TEXTS}.length === 4")
        assert browser.run(TEXTS) == before
        browser.run("document.getElementById('clear').click()")
        assert browser.run(TEXTS) == []
        assert served.engine.stats().prompt_tokens > 0

    show(browser, scene)


@pytest.mark.parametrize("way", ["button", "key"])
def test_an_answer_can_be_stopped(browser: Browser, way: str) -> None:
    def scene(browser: Browser, served: Served) -> None:
        for _ in range(20):  # the model may end an answer before it is stopped
            browser.type("Go on")
            browser.press("Enter")
            browser.wait("[...document.querySelectorAll('.assistant .text')].at(-1)?.textContent || !stopper")
            if way == "key":
                browser.press("Escape")
            else:
                browser.run("document.getElementById('stop').click()")
            browser.wait("!stopper")
            if browser.run(LAST_NOTE) == "stopped":
                break
            browser.run("document.getElementById('clear').click()")
        assert browser.run(LAST_NOTE) == "stopped"
        assert browser.run("document.getElementById('stop').hidden")
        browser.wait("fetch('state').then(r => r.json()).then(state => state.running === 0)")
        assert served.engine.stats().finished[FinishReason.CANCELLED] == 1

    show(browser, scene)


def test_errors_are_shown_and_the_message_is_not_lost(browser: Browser) -> None:
    def scene(browser: Browser, served: Served) -> None:
        browser.run("document.getElementById('temperature').value = -1")
        browser.type("Hello")
        browser.press("Enter")
        assert "temperature is -1" in browser.wait("document.querySelector('.error .text')?.textContent")
        browser.wait("!stopper")
        assert browser.run("document.getElementById('message').value") == "Hello"

    show(browser, scene)


def test_a_key_is_asked_for(browser: Browser) -> None:
    def scene(browser: Browser, served: Served) -> None:
        browser.wait("/wants an API key/.test(document.getElementById('state').textContent)")
        browser.wait("document.activeElement.id === 'key'")
        browser.type("secret")
        browser.press("Enter")
        browser.run("document.getElementById('message').focus()")
        browser.wait("/running/.test(document.getElementById('state').textContent)")

    show(browser, scene, api_key="secret", key="secret")
