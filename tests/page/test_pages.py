"""The page of a run in a real browser: each kind of run, and output that means harm."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser import PHONE, Browser, browser

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.command import Place

pytestmark = pytest.mark.long

MOST_BYTES = 2_000_000
TRAIN = """
    import glob, os, sys, time
    rank = int(os.environ["RANK"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(3):
        print(f"rank {rank} step {step}", flush=True)
    print(f"warning of rank {rank}", file=sys.stderr, flush=True)
    open(f"{__file__}.{attempt}.{rank}", "x").close()
    if sys.argv[1] == "fail" and rank in (1, 2):
        while len(glob.glob(f"{glob.escape(__file__)}.{attempt}.*")) < 4:  # no rank is stopped before it has written
            time.sleep(0.01)
        raise ValueError(f"bad shape of batch, attempt {attempt}")
    """
HANG = """
    import os, threading
    from phalanx import timer

    def all_reduce():
        threading.Event().wait(60)

    def read_batch():
        threading.Event().wait(60)

    timer.beat()
    read_batch() if os.environ["RANK"] == "2" else all_reduce()
    """


def make(place: Place) -> Path:
    """The page of the place's run."""
    done = place.program(sys.executable, "-m", "phalanx", "report", "--log-dir", place.logs, "--html")
    assert done[::2] == (0, ""), done
    return Path(done.out.strip())


def run_of(place: Place) -> Path:
    (folder,) = place.logs.iterdir()
    return folder


def sample(folder: Path, count: int) -> None:
    """Write samples, as a run's sampler does: one every 5 s."""
    run = json.loads((folder / "run.json").read_text())
    ranks = [rank["rank"] for rank in run["attempts"][-1]["ranks"]]
    with (folder / "samples.jsonl").open("w") as file:
        for number in range(count):
            line: dict[str, Any] = {"time": run["started"] + 5 * number, "attempt": 0, "ranks": ranks}
            line |= {"cpu": [4.5 * number for _ in ranks], "memory": [(1 << 28) + rank for rank in ranks]}
            line |= {"step": [number for _ in ranks], "step_time": [0.2 + (rank == 3) * 0.2 for rank in ranks]}
            line |= {"beat": [0.5 for _ in ranks], "threads": [4 for _ in ranks]}
            line |= {"gpu": [90.0 for _ in ranks], "gpu_memory": [rank << 30 for rank in ranks]}
            file.write(json.dumps(line) + "\n")
        file.write('{"time": 1795')  # torn


def check(page: Path, one: Browser, *, schemes: tuple[bool, ...] = (False, True)) -> None:
    """See that a page does no harm, loads nothing, fits a phone, and can be read by everybody."""
    assert page.stat().st_size < MOST_BYTES
    for dark in schemes:
        one.open(page, dark=dark)
        assert one.violations() == []
    one.open(page, size=PHONE)
    assert one.ask("return document.documentElement.scrollWidth") <= PHONE[0]
    one.open(page)
    assert one.problems() == []
    assert one.requests() == []


def succeeds(place: Place) -> str:
    assert place.run("--nproc-per-node", 4, "-r", 3, place.write(TRAIN), "well").status == 0
    return "succeeded"


def raises(place: Place) -> str:
    assert place.run("--nproc-per-node", 4, "-r", 3, place.write(TRAIN), "fail").status == 1
    return "failed"


def hangs(place: Place) -> str:
    assert place.run("--nproc-per-node", 4, "--hang-timeout", "0.5", place.write(HANG)).status != 0
    return "failed"


def restarts(place: Place) -> str:
    assert place.run("--nproc-per-node", 4, "--max-restarts", 2, place.write(TRAIN), "fail").status == 1
    return "failed"


def of_many_ranks(place: Place) -> str:
    command = ("--no-python", "sh", "-c", "echo $RANK; [ $RANK != 77 ]")
    assert place.run("--nproc-per-node", 256, *command).status == 1
    return "failed"


@pytest.mark.parametrize("kind", [succeeds, raises, hangs, restarts, of_many_ranks])
@pytest.mark.timeout(240)
def test_the_page_of_a_run_that(kind: Callable[[Place], str], place: Place) -> None:
    verdict = kind(place)
    sample(run_of(place), 30)
    page = make(place)
    with browser() as one:
        check(page, one, schemes=(False,) if kind is of_many_ranks else (False, True))
        assert one.shown("h1 .verdict") == [verdict]
        assert len(one.shown("#charts figure")) == 7  # what is null everywhere is not plotted
        assert one.ask("return document.querySelectorAll('canvas.heat').length") == (7 if kind is of_many_ranks else 0)
        # A click on a bar of the timeline leads to its rank, and one on a mark to its event.
        one.click(".plot a[aria-label^='rank 1, attempt'] rect")
        assert one.ask("return location.hash").startswith(("#w", "#a"))
        assert one.ask("return document.querySelector(':target').offsetParent !== null")
        one.click(".plot a[aria-label*='start of attempt'] .g")
        assert "start of attempt 0" in one.ask("return document.querySelector(':target').textContent")


def test_the_log_is_searched_and_an_event_leads_to_its_lines(place: Place) -> None:
    raises(place)
    page = make(place)
    with browser() as one:
        one.open(page)
        every = len(one.shown("#lines .l"))
        one.type("#q", "STEP 2")
        assert {text[-6:] for text in one.shown("#lines .l")} == {"step 2"}
        assert one.shown("#found") == [f"4 of {every} lines"]
        one.type("#r", "0,2-3")
        assert sorted(one.shown("#lines .l b")) == ["0", "2", "3"]
        one.type("#r", "two")
        assert one.shown("#found") == ["Ranks are written so: 0,4-7"]
        one.click("#filter button")
        assert len(one.shown("#lines .l")) == every
        one.choose("#s", "stderr")
        assert "warning of rank 3" in "".join(one.shown("#lines .l span"))
        assert "step" not in "".join(one.shown("#lines .l span"))
        ranks = one.ask("return document.querySelector('tr.k-failure a.jump').dataset.ranks").split(",")
        assert set(ranks) <= {"1", "2"}  # the second may be stopped for the first
        one.click("tr.k-failure a.jump")
        assert set(one.shown("#lines .l b")) == set(ranks)
        assert one.ask("return document.querySelector(':target').classList.contains('l')")
        assert one.problems() == []


def test_a_page_can_be_read_without_its_script(place: Place) -> None:
    raises(place)
    sample(run_of(place), 10)
    page = make(place)
    with browser() as one:
        one.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
        one.open(page)
        one.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        text = one.driver.find_element("css selector", "body").text
        for part in (
            "bad shape of batch, attempt 0",
            "rank 3 step 2",
            "The plots need JavaScript",
            "start of attempt 0",
        ):
            assert part in text
        assert one.shown("#filter") == []


HOSTILE = r"""
    import os, sys
    out = sys.stdout.buffer
    rest = [
        b"<script>window.pwned = 1; document.title = 'pwned'</script>",
        b"</script><script>window.pwned = 2</script><img src=x onerror='window.pwned = 3'>",
        b"</div></section></main></body><h1>pwned</h1><!--",
        "bidi \u202e evil \u2066 x \u2069 \u200e".encode(),
        b"\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J nul \0 bad \xff\xfe\xc3",
        b"{{ 7*7 }} {% raw %} ${7*7} \xe2\x80\xa8 separator",
        b"<link rel=stylesheet href=http://127.0.0.1:9/x.css><base href=http://127.0.0.1:9/>",
        b"10%\r20%\r100%",
        b"B" * 100_000,
    ]
    out.write(b"A" * 10_000_000 + b"\n" + b"\n".join(rest) + b"\n")
    out.flush()
    print("</script><script>window.pwned = 4</script>", file=sys.stderr)
    raise ValueError("</script><script>window.pwned = 5</script> \u202e {{ 7*7 }} \x1b[31m <b>")
    """


def test_hostile_output_harms_no_page(place: Place) -> None:
    evil = "</script><img src=x onerror='window.pwned = 6'>"
    assert (
        place.run("--nproc-per-node", 1, "-r", 3, place.write(HOSTILE, f"{evil.replace('/', '')}.py"), evil).status == 1
    )
    folder = run_of(place)
    with (folder / "events.jsonl").open("a") as file:
        wrong = {"name": "group.not_started", "timestamp": 1e9, "monotonic_ns": 1, "attempt": 0, "error": evil}
        file.write(f"{json.dumps(wrong)}\n[]\n{{\n\0\xff\n" + '{"name": "worker.exited", "timestamp": "x"}\n' * 3)
    page = make(place)
    text = page.read_text()
    assert not {"\x1b", "\0", "\u202e", "\u2066", "\u2028", "\r"} & set(text)
    with browser() as one:
        check(page, one)
        assert one.ask("return window.pwned") is None
        assert "pwned" not in one.driver.title.replace("window.pwned", "")
        lines = one.shown("#lines .l span")
        for part in (
            *(
                "<script>window.pwned = 1;",
                "<img src=x onerror='window.pwned = 3'>",
                "bidi \\u202e evil",
                "nul \\x00 bad \\xff",
            ),
            *("{{ 7*7 }} {% raw %}", "100%", "B … 98,000 more characters", "</script><script>window.pwned = 4"),
        ):
            assert any(part in line for line in lines), part
        assert one.shown("h1") == one.shown("header h1")  # no other
        assert one.ask("return document.querySelectorAll('script').length") == 2
        assert "These are the last 2.0 MiB of" in "".join(one.shown("#log .cut"))


def test_what_is_damaged_is_named(place: Place) -> None:
    raises(place)
    folder = run_of(place)
    short = b'{"time": 1, "attempt": 0, "ranks": [0, 1], "cpu": [1]}\n'
    (folder / "samples.jsonl").write_bytes(os.urandom(4096) + b"\n" + b'{"time": 1e400}\n[1]\nnull\n' + short)
    (folder / "events.jsonl").write_bytes(
        b'{"name": "worker.exited", "rank": {}}\n{"name": "run.ended"\n' + os.urandom(999)
    )
    (folder / "attempt_0" / "timeline").write_bytes(os.urandom(999))
    (folder / "attempt_0" / "1" / "error.json").write_bytes(b"\xff{")
    (folder / "run.json").write_text("{}")
    page = make(place)
    with browser() as one:
        check(page, one)
        assert "The record of this run cannot be read" in "".join(one.shown(".sentence"))
        assert "samples could not be read" in "".join(one.shown(".notes"))
        assert "rank 3 step 2" in "".join(one.shown("#lines"))
