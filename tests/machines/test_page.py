"""The page of a job of three hosts, one of which is lost; in a real browser, too."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.page.test_pages import check
from tests.support.browser import browser
from tests.support.helpers import descendants, wait_gone

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.jobs import Job

pytestmark = pytest.mark.long


def test_a_machine_that_is_left_out_is_on_the_page(hosted_job: Callable[..., Job]) -> None:
    job = hosted_job("1:2", "c10d")
    options = ("--exclude-after", "1", "--max-restarts", "3", "--on-report", "always")
    first, second = job.start(1, 2, options=options)
    first.workers(0, 4)
    job.fail(int(second.workers(0, 4)[0]), 0)
    first.wait_for("host h2 is left out from now on: its workers were the root cause too often in a row")
    first.workers(1, 2)
    job.end.touch()
    assert first.end() == 0
    (page,) = first.home.glob("phalanx/runs/*/report.html")
    text = page.read_text()
    assert "<dt>h2</dt><dd>left out: its workers were the root cause too often in a row</dd>" in text
    assert "host h2 is left out from now on" in text


def test_each_host_has_a_page_that_names_the_lost_one(hosted_job: Callable[..., Job]) -> None:
    job = hosted_job("3", "c10d")
    first, second, third = job.start(1, 2, 3)
    for agent in job.agents:
        agent.workers(0, 6)
    below = descendants(third.process.pid)
    os.kill(third.launcher(), signal.SIGKILL)
    assert not wait_gone(below)
    pages = []
    for agent in (first, second):
        assert agent.end() == 1
        (page,) = agent.home.glob("phalanx/runs/*/report.html")
        assert agent.said.splitlines()[-1] == f"phalanx: page: {page}"
        pages.append(page)
    with browser() as one:
        for page in pages:
            check(page, one)
            assert one.shown("#machines dt") == ["h3"]
            assert one.shown("h1 .verdict") == ["failed"]
            assert "A machine is lost" in "".join(one.shown(".sentence"))
            one.click(".plot a[aria-label*='is lost'] .g")
            assert "is lost" in one.ask("return document.querySelector(':target').textContent")
