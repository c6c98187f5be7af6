"""`--metrics-port`, and the same server by its variable: what probes and Prometheus read of real runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as text_metrics

from phalanx.cli._commands import cli
from tests.support.command import Place
from tests.support.helpers import TIMEOUT, Gate, Ready

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

ROOT = Path(__file__).parents[2]
VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def get(port: int, path: str, accept: str = "") -> tuple[int, str, str]:
    """The status, the type of the content, the content."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as found:  # noqa: S310 - it is HTTP
            return found.status, found.headers["Content-Type"], found.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def until(port: int, status: int, state: str = "RUNNING") -> dict[str, Any]:
    """Ask for the health until it is that."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        found, _, text = get(port, "/healthz")
        told: dict[str, Any] = json.loads(text)
        if (found, told["state"]) == (status, state):
            return told
        assert time.monotonic() < deadline, (found, told)


def samples(text: str) -> dict[str, float]:
    """What a scrape has, by the name and the labels of each series."""
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def rows() -> list[list[str]]:
    """The metrics as the page has them: name, type, labels, help."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    below = page.partition("\n## The metrics\n")[2]
    lines = re.findall(r"(?m)^\| `phalanx_.*\|$", below)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.slow
def test_a_scrape_of_a_run_that_was_restarted(place: Place, ready: Ready, gate: Gate, port: int) -> None:
    script = place.write(f"""
        import os, signal, sys
        from phalanx import timer
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "0":
                {gate.python()}
                sys.exit(1)
            signal.pause()
        timer.progress(7)
        {ready.python(f"[os.environ.get(name) for name in ('PHALANX_METRICS_PORT', '{VARIABLE}')]")}
        {gate.python()}
        """)
    place.env |= {"PHALANX_METRICS_PORT": str(port), VARIABLE: f"127.0.0.1:{port}"}  # of both, one port
    options = ("--nproc-per-node", 2, "--max-restarts", 3, "--run-id", "night", "--hang-timeout", "1h")
    with place.start(*options, script) as launcher:
        gate.open()
        assert ready.wait(2) == ["['', '']"] * 2
        until(port, 200)
        while 'phalanx_restarts_total{cause="failure"} 1' not in get(port, "/metrics")[2]:
            pass  # what has just happened is counted soon
        status, kind, text = get(port, "/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        opened, open_kind, open_text = get(port, "/metrics", OPEN_METRICS)
        assert (opened, open_kind.split(";")[:2]) == (200, OPEN_METRICS.split(";"))
        assert get(port, "/metrics", "application/openmetrics-text; version=none")[0] == 200
        assert [get(port, path)[0] for path in ("/", "/?x", "/nowhere", "/metrics/", "/Healthz")] == [
            200,
            200,
            *[404] * 3,
        ]
        gate.open(2)
        assert launcher.end().status == 0
    found = samples(text)
    rank = 'local_rank="1",rank="1"'
    expected = {
        "phalanx_up": 1, "phalanx_healthy": 1, "phalanx_attempt": 1, "phalanx_max_restarts": 3, "phalanx_ranks": 2,
        "phalanx_ranks_alive": 2, "phalanx_paused": 0, "phalanx_hang_timeout_seconds": 3600,
        'phalanx_state{phalanx_state="RUNNING"}': 1, 'phalanx_state{phalanx_state="FAILED"}': 0,
        'phalanx_restarts_total{cause="failure"}': 1, 'phalanx_restarts_total{cause="hang"}': 0,
        'phalanx_hangs_total{timer="heartbeat"}': 0, f"phalanx_rank_up{{{rank}}}": 1, f"phalanx_rank_step{{{rank}}}": 7,
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected
    assert sum(found[f'phalanx_worker_exits_total{{state="{state}"}}'] for state in ("failed", "stopped")) == 2
    assert 0 < found["phalanx_restart_seconds_total"] < TIMEOUT
    assert abs(found[f"phalanx_rank_start_time_seconds{{{rank}}}"] - time.time()) < 10 * TIMEOUT
    for name in ("memory_bytes", "threads", "cpu_seconds_total", "heartbeat_age_seconds"):
        assert found[f"phalanx_rank_{name}{{{rank}}}"] >= 0
    assert [name for name in found if "night" in name] == [
        name for name in found if name.startswith("phalanx_run_info{")
    ]
    check_formats(text, open_text)


def promtool() -> str:
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("all else holds, but there is no promtool to say so: it is in Debian's package prometheus")
    return path


def check_formats(text: str, open_text: str) -> None:
    """Both are what the library's own parsers, promtool and the page say that they are."""
    families = list(open_metrics(open_text))
    suffix = {"counter": "_total", "info": "_info"}
    known = [[f"`{one.name}{suffix.get(one.type, '')}`", one.type, one.documentation] for one in families]
    assert [[name, kind, text] for name, kind, _labels, text in rows()] == known
    labels = {
        f"`{one.name}{suffix.get(one.type, '')}`": {label for sample in one.samples for label in sample.labels}
        for one in families
        if one.samples
    }
    documented = {name: set(re.findall(r"\w+", shown)) for name, _kind, shown, _text in rows()}
    assert {name: documented[name] for name in labels} == labels
    assert {one.name for one in text_metrics(text)} >= {one.name for one in families if one.type == "gauge"}
    assert not any(sample.name.startswith(("python_", "process_")) for one in families for sample in one.samples)
    done = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


ALERTS = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{ series: 'up{{job="phalanx", instance="a"}}', values: "1x10 0x300" }}
      - {{ series: 'phalanx_state{{phalanx_state="FAILED", instance="b"}}', values: "0x10 1x300" }}
      - {{ series: 'phalanx_healthy{{instance="b"}}', values: "1x10 0x300" }}
      - {{ series: 'phalanx_healthy{{instance="c"}}', values: "1x10 0x300" }}
      - {{ series: 'phalanx_paused{{instance="c"}}', values: "0x310" }}
      - {{ series: 'phalanx_rank_step_timestamp_seconds{{instance="c", rank="0"}}', values: "600x310" }}
      - {{ series: 'phalanx_restarts_total{{instance="d", cause="hang"}}', values: "0+1x310" }}
      - {{ series: 'phalanx_restarts_total{{instance="e", cause="membership"}}', values: "0+1x310" }}
      - {{ series: 'phalanx_restart_seconds_total{{instance="d"}}', values: "0+50x310" }}
      - {{ series: 'phalanx_rank_slow_ratio{{instance="e", rank="5"}}', values: "1.4x10 1.8x300" }}
      - {{ series: 'phalanx_rank_memory_bytes{{instance="e", rank="5"}}', values: "1000+100x310" }}
      - {{ series: 'phalanx_rank_start_time_seconds{{instance="e", rank="5"}}', values: "-3600x310" }}
      - {{ series: 'phalanx_rank_memory_bytes{{instance="e", rank="6"}}', values: "1000x310" }}
      - {{ series: 'phalanx_rank_start_time_seconds{{instance="e", rank="6"}}', values: "-3600x310" }}
      - {{ series: 'phalanx_rank_memory_bytes{{instance="e", rank="7"}}', values: "1000+4000x3 13000x300" }}
      - {{ series: 'phalanx_rank_start_time_seconds{{instance="e", rank="7"}}', values: "0x310" }}
    alert_rule_test:
{cases}
"""

FIRED = {
    "PhalanxDown": ("15m", {"job": "phalanx", "instance": "a"}),
    "PhalanxFailed": ("15m", {"phalanx_state": "FAILED", "instance": "b"}),
    "PhalanxNoProgress": ("15m", {"instance": "c"}),  # and not b, which has failed
    "PhalanxNoStep": ("50m", {"instance": "c"}),
    "PhalanxRestartLoop": ("60m", {"instance": "d"}),
    "PhalanxTimeLost": ("120m", {"instance": "d"}),
    "PhalanxSlowRank": ("30m", {"instance": "e", "rank": "5"}),
    "PhalanxMemoryGrows": ("35m", {"instance": "e", "rank": "5"}),  # and not 7, which has loaded its model
}
"""Of each alert when it is asked for, and the labels of the one series that it is about then."""


def test_the_alerts_fire_for_what_they_are_about(tmp_path: Path) -> None:
    rules = ROOT / "docs" / "assets" / "phalanx.rules.yml"
    text = rules.read_text(encoding="utf-8")
    levels = dict(re.findall(r"alert: (\w+)\n(?:.*\n)*?.*severity: (\w+)", text))
    assert levels.keys() == FIRED.keys()
    cases = []
    for alert, (when, labels) in FIRED.items():
        shown = ", ".join(f'{name}: "{value}"' for name, value in {**labels, "severity": levels[alert]}.items())
        cases.append(
            f"      - {{ eval_time: {when}, alertname: {alert}, exp_alerts: [{{ exp_labels: {{ {shown} }} }}] }}"
        )
        cases.append(f"      - {{ eval_time: 2m, alertname: {alert}, exp_alerts: [] }}")
    bare = tmp_path / "bare.yml"  # what annotations say is not compared
    bare.write_text(re.sub(r" *annotations:\n.*\n", "", text))
    test = tmp_path / "test.yml"
    test.write_text(ALERTS.format(rules=bare, cases="\n".join(cases)))
    for command in (("check", "rules", rules), ("test", "rules", test)):
        done = subprocess.run([promtool(), *map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done


def test_alerts_and_board_ask_for_what_there_is() -> None:
    rules = (ROOT / "docs" / "assets" / "phalanx.rules.yml").read_text(encoding="utf-8")
    board = json.loads((ROOT / "docs" / "assets" / "phalanx-dashboard.json").read_text(encoding="utf-8"))
    places = [place["gridPos"] for place in board["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    asked = re.findall(r"(?m)^ *expr: (.*)$", rules)
    asked += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [str(variable["query"]) for variable in board["templating"]["list"]]
    asked += [note["expr"] for note in board["annotations"]["list"]]
    known = {name.strip("`"): {*re.findall(r"\w+", labels), "instance", "job"} for name, _, labels, _ in rows()}
    found: set[str] = set()
    for expression in asked:
        without_labels = re.sub(r"\{.*?\}|(by|on) \(.*?\)|label_values\(.*?, ", "", expression)
        names = {*re.findall(r"\bphalanx_\w+", without_labels), *re.findall(r"\((phalanx_\w+)", expression)}
        assert names <= known.keys() or expression == "prometheus", expression
        found |= names
        for name, labels in re.findall(r"(phalanx_\w+)\{(.*?)\}", expression):
            assert {label.strip() for label in re.findall(r"(\w+)=~?", labels)} <= known[name], expression
    assert found >= {"phalanx_healthy", "phalanx_rank_step_median_seconds", "phalanx_rank_memory_bytes"}


@pytest.mark.slow
def test_the_health_follows_the_heartbeats(place: Place, ready: Ready, gate: Gate, port: int) -> None:
    script = place.write(f"""
        import os
        from phalanx import timer
        {ready.python()}
        {gate.python()}
        timer.progress(41)
        if os.environ["RANK"] == "0":
            {gate.python()}
            timer.progress(42)
            {gate.python()}
        with timer.rest():
            {ready.python()}
            open({str(place.folder / "end")!r}).close()
        """)
    os.mkfifo(place.folder / "end")
    options = ("--hang-timeout", "1", "--on-expiry", "report", "--run-id", "night", "--metrics-port", port)
    with place.start("--nproc-per-node", 2, *options, script) as launcher:
        ready.wait(2)
        assert "why" not in until(port, 200)  # nobody has beaten: nobody is late
        gate.open(2)
        ready.wait()  # rank 1 rests
        why = until(port, 503)["why"]
        assert re.fullmatch(
            r"no rank has made progress: the last heartbeat is .* old \(rank 0, at step 41\), "
            r"and the hang timeout is 1\.0s",
            why,
        )
        assert samples(get(port, "/metrics")[2])["phalanx_healthy"] == 0
        gate.open()
        until(port, 200)
        until(port, 503)
        control(place, "pause")
        until(port, 200)
        control(place, "resume")
        until(port, 503)
        gate.open()
        ready.wait()
        until(port, 200)  # both rest
        with open(place.folder / "end", "wb"):
            assert launcher.end().status == 0


def control(place: Place, command: str) -> None:
    done = place.program(sys.executable, "-m", "phalanx", command, "--log-dir", place.logs, "night")
    assert done.status == 0, done


@pytest.mark.slow
def test_a_breakpoint_is_no_hang(place: Place, ready: Ready, port: int) -> None:
    script = place.write(f"""
        import os
        from phalanx import timer
        timer.progress(1)
        if os.environ["RANK"] == "0":
            {ready.python()}
            breakpoint()
        else:
            {ready.python()}
            __import__("signal").pause()
        """)
    options = ("--hang-timeout", "0.2", "--on-expiry", "report", "--metrics-port", port, "--nproc-per-node", 2)
    with place.start(*options, script) as launcher:
        ready.wait(2)
        launcher.read_until("rank 0 stopped at ")
        until(port, 200)
        told = [get(port, "/healthz")[0] for _ in range(200)]
        assert told == [200] * 200
        launcher.send(signal.SIGINT)
        launcher.send(signal.SIGINT)
        launcher.end()


@pytest.mark.slow
def test_a_hang_that_ends_the_group_is_a_restart_of_that_cause(
    place: Place, ready: Ready, gate: Gate, port: int
) -> None:
    script = place.write(f"""
        import os, signal
        from phalanx import timer
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            timer.progress(3)
            signal.pause()
        {ready.python()}
        {gate.python()}
        """)
    options = ("--hang-timeout", "0.3", "--max-restarts", 1, "--run-id", "night", "--metrics-port", port)
    with place.start(*options, script) as launcher:
        ready.wait()
        until(port, 200)
        found = samples(get(port, "/metrics")[2])
        control(place, "restart")
        ready.wait()
        until(port, 200)
        while samples(get(port, "/metrics")[2])["phalanx_attempt"] < 2:  # a scrape of the second before
            pass
        asked = samples(get(port, "/metrics")[2])
        gate.open()
        assert launcher.end().status == 0
    assert asked['phalanx_restarts_total{cause="request"}'] == 1
    assert found['phalanx_restarts_total{cause="hang"}'] == 1
    assert found['phalanx_hangs_total{timer="heartbeat"}'] == 1
    assert found['phalanx_worker_exits_total{state="failed"}'] == 1


@pytest.mark.slow
def test_the_option_and_the_variable_may_name_two(
    place: Place, ready: Ready, gate: Gate, port: int, second_port: int
) -> None:
    script = place.write(f"{ready.python()}\n{gate.python()}")
    place.env[VARIABLE] = str(port)
    with place.start("--metrics-port", f"localhost:{second_port}", script) as launcher:
        ready.wait()
        assert [get(each, "/metrics")[0] for each in (port, second_port)] == [200, 200]
        del place.env[VARIABLE]
        second = place.run("--metrics-port", f"127.0.0.1:{second_port}", script)
        assert second.status == 1
        assert f"Error: --metrics-port: 127.0.0.1:{second_port}: Address already in use\n" in second.err
        assert len(list(place.logs.iterdir())) == 1
        gate.open()
        assert launcher.end().status == 0


@pytest.mark.slow
def test_without_the_library_the_variable_has_health_alone(place: Place, ready: Ready, gate: Gate, port: int) -> None:
    place.write("raise ImportError('planted')", "prometheus_client.py")
    place.env |= {VARIABLE: str(port), "PYTHONPATH": os.pathsep.join((str(place.folder), *filter(None, sys.path)))}
    with place.start(place.write(f"{ready.python()}\n{gate.python()}")) as launcher:
        ready.wait()
        until(port, 200)
        for _ in range(2):
            status, kind, text = get(port, "/metrics")
            assert (status, kind) == (501, "text/plain; charset=utf-8")
            assert text == "metrics need prometheus-client (planted): pip install prometheus-client\n"
        gate.open()
        assert launcher.end().status == 0


def test_without_the_library_the_option_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    script = place.write("")
    done = CliRunner().invoke(cli, ["run", "--log-dir", str(place.logs), "--metrics-port", "9100", script])
    assert done.exit_code == 2
    assert "--metrics-port needs prometheus-client, which is not installed here: pip install" in done.output
    assert not place.logs.exists()
