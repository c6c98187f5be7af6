"""A real browser that looks at a page: Debian's chromium, driven over WebDriver."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import LIMIT

WIDE = (1280, 900)
PHONE = (390, 844)


class Browser:
    """A page in a browser, without a window. What it logs and what it requests is kept."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path | str, *, dark: bool = False, size: tuple[int, int] = WIDE) -> None:
        """Open a file, or an address, as a person does, with these preferences."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        still = [{"name": "prefers-reduced-motion", "value": "reduce"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [*scheme, *still]})
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.requests()  # of the browser's own page
        self.driver.get(page if isinstance(page, str) else page.as_uri())

    def ask(self, script: str, *values: Any) -> Any:
        """Run a script in the page, and return what it returns."""
        return self.driver.execute_script(script, *values)

    def until(self, script: str, *values: Any) -> Any:
        """Run a script in the page until what it returns is true, and return that."""
        deadline = time.monotonic() + LIMIT
        while not (found := self.ask(script, *values)):
            assert time.monotonic() < deadline, (
                f"{script}: {found!r}\n{self.ask('return document.body.innerText.slice(0, 2000)')}"
            )
            time.sleep(0.05)
        return found

    def click(self, selector: str) -> None:
        """Click what a selector finds first, as a mouse does: what lies above it would take the click."""
        found = self.driver.find_element("css selector", selector)
        self.ask("arguments[0].scrollIntoView({block: 'center'})", found)
        found.click()

    def type(self, selector: str, text: str) -> None:
        """Type into a field, in place of what it has."""
        field = self.driver.find_element("css selector", selector)
        field.clear()
        field.send_keys(text)

    def choose(self, selector: str, text: str) -> None:
        """Choose one of a list by its text."""
        found = self.driver.find_element("css selector", selector)
        next(one for one in found.find_elements("css selector", "option") if one.text == text).click()

    def shown(self, selector: str) -> list[str]:
        """The texts of what a selector finds, and a person can see."""
        script = (
            "return [...document.querySelectorAll(arguments[0])]"
            ".filter((one) => one.offsetParent !== null).map((one) => one.textContent)"
        )
        found: list[str] = self.ask(script, selector)
        return found

    def problems(self) -> list[str]:
        """What the console has: errors of scripts, and what the Content-Security-Policy has forbidden."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses that were asked for, but for the file itself."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith(("file:", "data:", "chrome"))]  # the latter: its own pages

    def violations(self) -> list[tuple[str, list[str]]]:
        """What axe-core finds: the rules, and the elements that violate them."""
        self.ask(resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
        script = "const done = arguments[arguments.length - 1]; axe.run().then((found) => done(found.violations))"
        found = self.driver.execute_async_script(script)
        return [(one["id"], [node["html"][:200] for node in one["nodes"]][:5]) for one in found]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own. Skips the test where there is none."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    pytest.importorskip("axe_core_python", reason="needs axe-core-python")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # it has a socket there, whose path may have 107 bytes
        for argument in (
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            f"--user-data-dir={home}/profile",
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(driver, env={**os.environ, "HOME": home, "TMPDIR": home})
        made = webdriver.Chrome(options=options, service=service)
        made.set_script_timeout(180)  # axe-core takes its time with hundreds of rows
        try:
            yield Browser(made)
        finally:
            made.quit()
