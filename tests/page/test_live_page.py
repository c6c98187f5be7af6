"""The pages of `phalanx serve` in a real browser while runs go on: what is new comes, what the reader has stays."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import pytest

from tests.support.browser import PHONE, Browser, browser
from tests.support.command import Launcher
from tests.support.disks import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.command import Place

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

NOWHERE: dict[str, Any] = {
    "stdout": subprocess.DEVNULL,
    "stderr": subprocess.DEVNULL,
}  # what ranks write would fill a pipe
TOKEN = "abcdefghijklmnop-1"  # noqa: S105 - of a server that lives as long as its test
OBEYS = """
    import os, sys, time
    from phalanx import timer

    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    number = step = 0
    while True:  # what the test says next, see `tell`
        path = f"{sys.argv[1]}.{attempt}.{number}"
        while not os.path.exists(path):
            time.sleep(0.02)
        number += 1
        word, _, rest = open(path).read().partition(" ")
        if word == "say":
            for line in range(int(rest)):
                timer.progress(step := step + 1)
                print(f"attempt {attempt} rank {rank} step {step}")
        elif word == "fill":
            for line in range(int(rest)):
                print(f"{line} {'x' * 1000}")
        elif word == "write":
            sys.stdout.buffer.write(eval(rest))
        elif word == "fail" and rank == 1:
            raise ValueError(rest)
        elif word == "end":
            break
        sys.stdout.flush()
    """


class Told:
    """A run whose ranks do what the test says."""

    def __init__(self, place: Place, *options: object, arguments: tuple[str, ...] = (), n: int = 2) -> None:
        self._path = place.folder / "told"
        self._count: dict[int, int] = {}
        known = set(place.logs.iterdir()) if place.logs.exists() else set()
        script = place.write(OBEYS)
        self.launcher = place.start("--nproc-per-node", n, *options, script, self._path, *arguments, **NOWHERE)

        def found() -> set[Path]:
            return set(place.logs.iterdir()) - known if place.logs.exists() else set()

        until(lambda: any((path / "run.json").exists() for path in found()))
        (self.folder,) = found()
        self.name = self.folder.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.launcher.__exit__(*error)

    def tell(self, word: str, attempt: int = 0) -> None:
        number = self._count[attempt] = self._count.get(attempt, -1) + 1
        path = self._path.with_name(f"{self._path.name}.{attempt}.{number}")
        path.with_suffix(".new").write_text(word)
        path.with_suffix(".new").rename(path)

    def end(self, attempt: int = 0) -> int:
        self.tell("end", attempt)
        return self.launcher.end().status


class Server:
    """`phalanx serve`: its address, and the address with its token."""

    def __init__(self, place: Place, *options: object, port: int = 0, token: str = TOKEN) -> None:
        place.logs.mkdir(exist_ok=True)
        argv = [sys.executable, "-m", "phalanx", "serve", str(place.logs), "--port", str(port), *map(str, options)]
        self.process = Launcher(argv, cwd=place.folder, env={**place.env, "PHALANX_SERVE_TOKEN": token})
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", self.process.read_until("http://", "stdout"))
        assert found, self.process.end()
        self.address, self.port = found[0], int(found[1])

    def page(self, run: Told | None = None, token: str = TOKEN) -> str:
        """The address of a run's page, or of the list, as a person opens it for the first time."""
        return f"{self.address}{f'runs/{run.name}' if run else ''}?token={token}"

    def stop(self) -> None:
        self.process.send(signal.SIGINT)
        self.process.end()


@contextmanager
def serving(place: Place, *options: object) -> Iterator[tuple[Server, Browser]]:
    """A server, and a browser that at its end has had no error, and has asked nobody else."""
    pytest.importorskip("uvicorn", reason="needs phalanx[web]")
    pytest.importorskip("starlette", reason="needs phalanx[web]")
    server = Server(place, *options)
    with server.process, browser() as one:
        yield server, one
        assert one.problems() == []
        assert {url for url in one.requests() if not url.startswith(server.address)} == set()


def lines(one: Browser, count: int) -> None:
    """Wait until the log has so many lines."""
    one.until("return document.querySelectorAll('#lines .l').length === arguments[0]", count)


def verdict(one: Browser, text: str) -> None:
    one.until("return document.querySelector('h1 .verdict').textContent === arguments[0]", text)


def test_a_run_that_fails_and_restarts_is_seen_without_a_reload(place: Place) -> None:
    with serving(place) as (server, one), Told(place, "--max-restarts", 1, "--sample", 1) as run:
        one.open(server.page(run))
        assert "token" not in one.ask("return location.href")
        one.ask("window.isTheSame = true")
        run.tell("say 30")
        lines(one, 60)
        one.until("return document.querySelectorAll('#charts canvas').length")
        picture = one.until("return document.querySelector('#charts canvas').toDataURL()")
        # What the reader does: searches, chooses a rank, folds and unfolds, scrolls, types in the middle of a word.
        one.click("#numbers summary")
        one.click("#a0 summary")
        one.type("#q", "step")
        one.type("#r", "0")
        one.until("return document.querySelector('#found').textContent === '30 of 60 lines'")
        one.ask("document.querySelector('#q').focus(); document.querySelector('#q').setSelectionRange(1, 3)")
        one.ask(
            "document.querySelector('#log').scrollIntoView(); window.canvas = document.querySelector('#charts canvas')"
        )
        before = one.ask("return document.querySelector('#h-log').getBoundingClientRect().top")

        run.tell("fail loss is nan")
        one.until("return document.querySelector('#failures')")
        assert "loss is nan" in "".join(one.shown("#failures"))
        verdict(one, "still running")
        run.tell("say 5", attempt=1)
        one.until("return document.querySelector('#found').textContent.startsWith('35 of ')")
        assert set(one.shown("#lines .l b")) == {"0"}
        one.until("return document.querySelector('#a1')")
        assert one.ask("return document.querySelector('#q').value + document.querySelector('#r').value") == "step0"
        script = "const one = document.activeElement; return [one.id, one.selectionStart, one.selectionEnd]"
        assert one.ask(script) == ["q", 1, 3]
        assert one.ask("return [...document.querySelectorAll('#numbers, #a0, #a1')].map((one) => one.open)") == [
            *(True, True, False),  # the document has attempt 1 first
        ]
        after = one.ask("return document.querySelector('#h-log').getBoundingClientRect().top")
        assert abs(after - before) < 2, "what is read has not moved, though a section has come above it"
        one.until("return document.querySelector('#charts canvas').toDataURL() !== arguments[0]", picture)
        assert one.ask("return canvas.isConnected"), "no chart was made anew"
        # What comes anew does what the old does.
        one.click("tr.k-failure a.jump")
        assert set(one.shown("#lines .l b")) == {"1"}

        assert run.end(attempt=1) == 0
        verdict(one, "succeeded")
        assert one.shown("#live") == ["The run has ended: succeeded."]
        assert one.ask("return isTheSame")


def test_the_lines_that_are_read_stay_while_older_ones_go(place: Place) -> None:
    with serving(place) as (server, one), Told(place, n=1) as run:
        run.tell("say 300")
        run.tell("fill 1800")
        one.open(server.page(run))
        lines(one, 2100)
        # Who reads the end, as the page opens while a run goes on, goes on to read the end.
        is_at_end = """
            const lines = document.querySelector("#lines");
            return lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
            """
        one.until(is_at_end)
        run.tell("say 1")
        lines(one, 2101)
        one.until(is_at_end)
        one.ask("""
            const rows = [...document.querySelectorAll("#lines .l")];
            window.row = rows.find((row) => row.textContent.includes("1500 xxx"));
            row.scrollIntoView({ block: "center" });
            getSelection().selectAllChildren(row.lastElementChild);
            """)
        # A chunk of lines has its height once it is seen.
        place_of_row = """
            const [lines, top] = [document.querySelector("#lines"), (one) => one.getBoundingClientRect().top];
            const look = (done) => done(top(row) - top(lines));
            return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => look(done))));
            """
        before = one.ask(place_of_row)
        run.tell("fill 400")  # more than a page holds
        one.until("return !document.querySelector('#lines').textContent.includes('step 300')")
        assert one.ask("return row.isConnected")
        assert one.ask("return getSelection().toString()").startswith("1500 xxx")
        assert abs(one.ask(place_of_row) - before) < 3
        assert run.end() == 0


def test_a_server_that_goes_and_comes_back(place: Place) -> None:
    with serving(place) as (server, one), Told(place, n=1) as run:
        run.tell("say 3")
        one.open(server.page(run))
        lines(one, 3)
        server.stop()
        one.until("return document.querySelector('#live').textContent.startsWith('The server is gone.')")
        said = one.ask("return document.querySelector('#live').innerText")
        assert re.search(r"as it was at \d\d:\d\d:\d\d by this browser's clock", said)
        one.click("nav a[href='#log']")  # which the line does not cover
        one.click("nav a[href='#ran']")
        run.tell("say 3")
        # One with another token lets nobody in, and says so.
        other = Server(place, port=server.port, token=TOKEN[::-1])
        with other.process:
            one.until("return document.querySelector('#live').textContent.includes('takes the token of this server')")
            other.stop()
        assert len(one.shown("#lines .l")) == 3
        again = Server(place, port=server.port)
        with again.process:
            lines(one, 6)
            one.until("return document.querySelector('#live').textContent.startsWith('Live')")
            run.tell("say 3")
            lines(one, 9)
            refused = [text for text in one.problems() if "ERR_CONNECTION_REFUSED" not in text and "401" not in text]
            assert refused == []
            one.open("about:blank")
        assert run.end() == 0
        one.problems()


def test_a_tab_that_nobody_sees_asks_for_nothing(place: Place) -> None:
    with serving(place) as (server, one), Told(place, n=1) as run:
        one.open(server.page(run))
        run.tell("say 3")
        lines(one, 3)
        watching = one.driver.current_window_handle
        one.driver.switch_to.new_window("tab")
        one.open(server.page())  # which is told of what is new, when the other would be
        assert one.ask("return document.querySelectorAll('tbody tr').length") == 1
        one.requests()
        assert run.end() == 0
        one.until("return document.querySelector('.chip').textContent === 'succeeded'")
        assert not [url for url in one.requests() if "/runs/" in url]
        one.driver.switch_to.window(watching)
        verdict(one, "succeeded")


def test_windows_side_by_side_keep_no_page_and_no_button_out(place: Place) -> None:
    """A browser has six connections to a server, for all of its windows."""
    with serving(place, "--allow-control") as (server, one), Told(place, n=1) as run:
        one.open(server.page(run))
        for number in range(7):
            if number:
                one.driver.switch_to.new_window("window")
                one.open(server.page(run))
            one.until("return document.querySelector('#live').textContent.startsWith('Live')")
            assert one.ask("return document.visibilityState") == "visible"
        windows = one.driver.window_handles
        assert len(windows) == 7
        run.tell("say 3")
        for window in windows:
            one.driver.switch_to.window(window)
            lines(one, 3)
        one.click("#control button[data-do=pause]")
        one.until("return document.querySelector('#answered').textContent.includes('1 worker paused')")
        one.click("#control button[data-do=resume]")
        one.until("return document.querySelector('#answered').textContent.includes('1 worker continued')")
        assert run.end() == 0


def test_a_server_that_hangs_is_said_and_a_button_waits(place: Place) -> None:
    with serving(place, "--allow-control") as (server, one), Told(place, n=1) as run:
        run.tell("say 3")
        one.open(server.page(run))
        lines(one, 3)
        # What is read aloud once it changes has to be there before.
        assert one.ask("""
            const region = document.querySelector("#answer");
            return [region.getAttribute("role"), getComputedStyle(region).display];
            """) == ["status", "block"]
        assert one.shown("#answered") == []
        server.process.send(signal.SIGSTOP)
        run.tell("say 3")
        one.click("#control button[data-do=pause]")
        one.until("return document.querySelector('#answered').textContent === 'Pause: asked …'")
        one.click("#control button[data-do=pause]")  # twice
        one.click("#control button[data-do=stop]")
        one.until("return document.querySelector('#answered').textContent.startsWith('Stop: not asked: Pause is not')")
        one.until("return document.querySelector('#live').textContent.startsWith('The server does not answer.')")
        server.process.send(signal.SIGCONT)
        one.until("return document.querySelector('#answered').textContent === 'Pause: 1 worker paused.'")
        lines(one, 6)
        one.until("return document.querySelector('#live').textContent.startsWith('Live')")
        one.click("#control button[data-do=resume]")
        one.until("return document.querySelector('#answered').textContent === 'Resume: 1 worker continued.'")
        one.click("#answer button")
        assert one.ask("return document.activeElement.dataset.do") == "resume"
        assert run.end() == 0


def test_what_was_wrong_is_said_no_longer_than_it_is(place: Place) -> None:
    with serving(place) as (server, one), Told(place, n=1) as run:
        run.tell("say 3")
        one.open(server.page(run))
        lines(one, 3)
        one.until("return document.querySelector('#live').textContent.startsWith('Live')")
        one.ask("""
            const line = document.querySelector("#live");
            window.said = [];
            new MutationObserver(() => said.push(line.textContent)).observe(line, { childList: true });
            """)
        away = run.folder.with_name("away")
        run.folder.rename(away)
        one.until("return said.length")
        again = server.address + "runs/" + run.name
        until(lambda: len([url for url in one.requests() if url.startswith(again)]) > 2)  # it has asked again
        away.rename(run.folder)
        run.tell("say 3")
        lines(one, 6)
        one.until("return document.querySelector('#live').textContent.startsWith('Live')")
        gone, _live = one.ask("return said")
        assert gone.startswith("The server has no such run any more")
        assert run.end() == 0
        assert all(" 404 " in problem for problem in one.problems())


def test_an_address_that_was_mangled_has_a_live_page(place: Place) -> None:
    with serving(place) as (server, one), Told(place, n=1) as run:
        one.open(server.page(run))
        one.open(f"{server.address}runs/{run.name}#%zz")
        one.driver.refresh()
        run.tell("say 3")
        lines(one, 3)
        assert run.end() == 0


def test_without_scripts_no_page_says_that_it_is_live(place: Place) -> None:
    with serving(place) as (server, one), Told(place, n=1) as run:
        one.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
        one.open(server.page(run))
        text = one.driver.find_element("css selector", "body").text
        assert "Without JavaScript this page does not change" in text
        assert "Live: " not in text
        one.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        assert run.end() == 0


def test_the_list_of_runs_is_live(place: Place) -> None:
    with serving(place) as (server, one):
        one.open(server.page())
        assert one.shown("main p") == ["There are no runs here."]
        with Told(place, n=2) as run:
            one.until("return document.querySelectorAll('tbody tr').length === 1")
            assert one.shown("h1 .verdict") == ["1 of 1 running"]
            row = one.ask("return window.row = document.querySelector('tbody tr')")
            run.tell("fail out of memory")
            one.until("return row.textContent.includes('failed')")
            assert "out of memory" in row.text
            one.until("return document.title === '0 of 1 runs running'")
            run.launcher.end()
        assert place.run("--nproc-per-node", 1, place.write("")).status == 0
        one.until("return document.querySelectorAll('tbody tr').length === 2")
        one.until("return row.isConnected && row.previousElementSibling.textContent.includes('succeeded')")
        one.click("tbody tr a")
        verdict(one, "succeeded")
        one.click(".over a")
        one.until("return document.querySelectorAll('tbody tr').length === 2")


IGNORES = """
    import signal, sys
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
    print("there", flush=True)
    while True:
        signal.pause()
    """


def test_buttons_act_on_the_run_and_what_is_refused_is_said(place: Place) -> None:
    script = place.write(IGNORES)
    with (
        serving(place, "--allow-control") as (server, one),
        place.start("--nproc-per-node", 2, "--grace", 300, script) as launcher,
    ):
        assert "there" in launcher.read_until("there", "stdout")
        (folder,) = place.logs.iterdir()
        one.open(f"{server.address}runs/{folder.name}?token={TOKEN}")

        def press(do: str, words: str) -> None:
            one.click(f"#control button[data-do={do}]")
            if do in ("stop", "stop-now", "restart"):
                alert = one.driver.switch_to.alert
                assert folder.name in alert.text
                alert.accept()
            label = one.shown(f"#control button[data-do={do}]")[0]
            script = """
                const text = document.querySelector("#answered").textContent;
                return text.startsWith(`${arguments[0]}: `) && text.includes(arguments[1]);
                """
            one.until(script, label, words)

        press("stack", "both ranks are in script.py:6")
        press("pause", "2 workers paused")
        press("resume", "2 workers continued")
        one.click("#answer button")
        assert one.shown("#answered") == []
        one.click("#control button[data-do=stop]")
        one.driver.switch_to.alert.dismiss()
        assert one.shown("#answered") == []
        press("stop", "It is being stopped")
        launcher.read_until("asked", "stdout")
        press("restart", "is being stopped")
        assert one.ask("return document.querySelector('#answered').classList.contains('bad')")
        press("stop-now", "killed")
        one.until("return !document.querySelector('#control')")
        done = launcher.end()
        assert f"pid {server.process.process.pid}" in done.err  # who has asked
        one.problems()  # the browser logs each answer that is no success


def test_who_only_watches_has_no_buttons(place: Place) -> None:
    with serving(place) as (server, one), Told(place, n=1) as run:
        one.open(server.page(run))
        verdict(one, "still running")
        assert one.shown("#control") == []
        ask = """
            const headers = { "X-Phalanx": "1", "Content-Type": "application/json" };
            const answer = fetch(arguments[0], { method: "POST", headers, body: '{"do": "stop"}' });
            return answer.then((one) => one.status);
            """
        assert one.ask(ask, f"/runs/{run.name}/control") == 404
        assert run.end() == 0
        assert len(one.problems()) == 1  # that one


def test_hostile_output_harms_no_page_that_is_live(place: Place) -> None:
    evil = "</script><img src=x onerror='window.pwned = 6'>"
    with serving(place) as (server, one), Told(place, arguments=(evil,), n=1) as run:
        one.open(server.page(run))
        rest = [
            b"<script>window.pwned = 1</script>",
            b"</script><script>window.pwned = 2</script><img src=x onerror='window.pwned = 3'>",
            b"</div></section></main></body></html><h1>pwned</h1><!--",
            b"</textarea></template></noscript><svg><script>window.pwned = 4</script></svg>",
            b"\x1b[31mred \0 \xff" + " \u202e evil \u2028".encode(),
            b"<div id=live>gone</div><form id=filter><input id=q name=id></form>",
        ]
        written = b"".join(line + b"\n" for line in rest)
        run.tell(f"write {written!r}")
        lines(one, len(rest))
        run.tell(f"write b'A' * 3_000_000 + b'\\n' + b'B' * 100_000 + b'\\n' + {written!r}")  # only its end is kept
        one.until("return document.querySelector('#lines').textContent.includes('98,000 more characters')")
        assert "<script>window.pwned = 1</script>" in one.shown("#lines .l span")
        assert one.ask("return window.pwned") is None
        assert one.ask("return document.querySelectorAll('script').length") == 2
        assert len(one.shown("h1")) == 1
        run.end()
        verdict(one, "succeeded")
        assert one.ask("return window.pwned") is None


def test_live_pages_can_be_read_by_everybody(place: Place) -> None:
    with serving(place, "--allow-control") as (server, one), Told(place, "--max-restarts", 1, "--sample", 1) as run:
        run.tell("say 3")
        run.tell("fail there")
        run.tell("say 3", attempt=1)
        for page in (run, None):
            for dark in (False, True):
                one.open(server.page(page), dark=dark)
                if page:
                    one.until("return document.querySelector('#a1')")
                    one.click("#control button[data-do=stack]")
                    one.until("return document.querySelector('#answered').textContent.includes('rank')")
                assert one.violations() == []
            one.open(server.page(page), size=PHONE)
            assert one.ask("return document.documentElement.scrollWidth") <= PHONE[0]
        assert run.end(attempt=1) == 0
