"""The files that a run is made into, without a browser: where they go, what they hold, and what they leave out."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import shutil
import sys
import tarfile
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.disks import until

if TYPE_CHECKING:
    from tests.support.command import Done, Place

pytestmark = pytest.mark.long

FAILS = """
    import os, sys
    print("hello", os.environ["RANK"], flush=True)
    raise ValueError("loss is nan")
    """
PAGE = "phalanx: page: "


def report(place: Place, *argv: object) -> Done:
    return place.program(sys.executable, "-m", "phalanx", "report", "--log-dir", place.logs, *argv)


def folder(place: Place) -> Path:
    (found,) = place.logs.iterdir()
    return found


def record(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder(place) / "run.json").read_text())
    return found


def lines_of(page: str) -> list[tuple[str, str]]:
    """The ranks and the texts of the log's lines."""
    return re.findall(r'<div class="l .".*? data-r="(\d+)"><i>.*?</i><b>\d+</b><span>(.*?)</span></div>', page)


def test_a_run_that_fails_ends_with_the_path_of_its_page(place: Place) -> None:
    done = place.run(place.write(FAILS))
    assert done.err.splitlines()[-1] == f"{PAGE}{folder(place)}/report.html"
    assert "loss is nan" in (folder(place) / "report.html").read_text()


@pytest.mark.parametrize(
    "options, script, is_written",
    [
        (["--on-report", "never"], FAILS, False),
        (["--on-report", "always"], "", True),
        ([], "", False),
    ],
)
def test_when_a_page_is_written(place: Place, options: list[str], script: str, is_written: bool) -> None:
    done = place.run(*options, place.write(script))
    assert (PAGE in done.err) == is_written
    assert (folder(place) / "report.html").exists() == is_written


def test_without_logs_there_is_no_page(place: Place) -> None:
    done = place.run("--log-dir", "/dev/null", place.write(FAILS))
    assert done.status == 1
    assert "page" not in done.err


def test_a_page_that_cannot_be_written_changes_no_exit_code(place: Place) -> None:
    script = place.write("""
        import os
        os.mkdir(os.environ["TORCHELASTIC_ERROR_FILE"].partition("attempt_")[0] + "report.html")
        raise SystemExit(7)
        """)
    done = place.run(script)
    assert done.status == 7
    assert re.findall(r"phalanx: the page of the run cannot be written: .*Is a directory.*\n", done.err)
    assert not list(folder(place).glob(".report*"))


def test_where_a_page_goes(place: Place) -> None:
    place.run("--on-report", "never", place.write(FAILS))
    assert report(place, "--html").out == f"{folder(place)}/report.html\n"
    elsewhere = place.folder / "a page.html"
    assert report(place, "--html", "-o", elsewhere).out == f"{elsewhere}\n"
    out = report(place, "--html", "-o", "-").out
    for page in (out, elsewhere.read_text()):
        assert page.startswith("<!DOCTYPE html>")
        assert page.endswith("</html>")
    assert report(place, "--html", "-o", "/dev/full") == (
        1,
        "",
        "Error: /dev/full cannot be written: No space left on device\n",
    )
    nowhere = report(place, "--html", "-o", place.folder / "no" / "page.html")
    assert (nowhere.status, nowhere.out) == (1, "")
    assert "cannot be written: No such file or directory" in nowhere.err


def test_secrets_are_left_out_of_pages_and_archives(place: Place) -> None:
    drawn = "ghp_16C7e42F292c6912E7710c838347Ae178B4a"
    secrets = {"WANDB_API_KEY": "wandb-1234", "HF_TOKEN": "hf_aa", "NCCL_LATER": drawn, "PYTORCH_PASSWORD": "hunter2"}
    place.env |= {**secrets, "NCCL_DEBUG": "INFO"}
    hidden = {
        *("opensesame", "abcd", "letmein", "plusplus", "nested", "injson", "inquery", "bearing", "incommand"),
        *("hf_aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH", "q7XkPz2VwLr9TnBs4HdYmGfC", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx"),
        "MIIBOgIBAAJBAKj34",
    }
    arguments = (
        *("--db-password=opensesame", "--token", "abcd", "s3://me:letmein@host/bucket", "--lr", "0.1"),
        *("+logger.api_key=plusplus", "--env=MY_TOKEN=nested", '{"api_key": "injson"}', "https://h/?token=inquery"),
        *("-H", "Authorization: Bearer bearing", "sh -c 'A=1 x --secret incommand'"),
        *("hf_aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH", "x:q7XkPz2VwLr9TnBs4HdYmGfC", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx"),
        "-----BEGIN RSA PRIVATE KEY-----\nMIIBOgIBAAJBAKj34\n-----END RSA PRIVATE KEY-----",
    )
    harmless = (
        *("--max-tokens 2048", "ckpt-epoch_12-step_120000-loss_0.123", "Llama-2-70b-chat-hf-GPTQ-4bit"),
        *("GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77", "--use-auth true", "Qwen2VLForConditionalGeneration"),
    )
    place.run("--on-report", "never", place.write(FAILS), *arguments, *" ".join(harmless).split())
    assert not [secret for secret in secrets.values() if secret in str(record(place)["environ"])]
    page = report(place, "--html", "-o", "-").out
    report(place, "--bundle", "-o", place.folder / "it.tgz")
    with tarfile.open(place.folder / "it.tgz") as archive:
        files = {name: archive.extractfile(name) for name in archive.getnames()}
        texts = [page, *(file.read().decode(errors="replace") for file in files.values() if file is not None)]
    for text in texts:
        assert not [secret for secret in (*secrets.values(), *hidden) if secret in text]
    for text in harmless:
        assert text in page
    assert "--lr 0.1" in page
    assert "--db-password=(left out)" in page.replace("&#39;", "")
    assert re.search("<dt>NCCL_DEBUG</dt><dd>INFO</dd>", page)
    assert re.search(r"<dt>Versions</dt><dd>Phalanx \S+, Python 3\.\S+, Linux \S+</dd>", page)


def test_the_commit_is_that_of_the_folder(place: Place) -> None:
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", place.folder)
    place.program(*git, "init", "-q", "-b", "night")
    place.program(*git, "commit", "-q", "--allow-empty", "-m", "first")
    expected = place.program(*git, "rev-parse", "HEAD").out.strip()
    place.program(*git, "pack-refs", "--all")
    place.run("--on-report", "always", place.write(""))
    assert f"<dd>{expected} (night); changes since are not known</dd>" in (folder(place) / "report.html").read_text()


def test_an_archive_has_the_page_and_the_logs(place: Place) -> None:
    place.run("--nproc-per-node", 2, "-r", 3, place.write(FAILS))
    with (folder(place) / "attempt_0" / "1" / "stdout.log").open("a") as file:
        file.truncate(1 << 30)  # of holes
    done = report(place, "--bundle")
    assert (done.status, done.out) == (0, f"{folder(place)}/report.tar.gz\n")
    assert "1 file left out, see LEFT_OUT.txt in the archive: attempt_0/1/stdout.log: " in done.err
    top = folder(place).name
    with tarfile.open(folder(place) / "report.tar.gz") as archive:
        names = set(archive.getnames())
        left_out = archive.extractfile(f"{top}/LEFT_OUT.txt")
        assert left_out is not None
        assert left_out.read().startswith(b"attempt_0/1/stdout.log: ")
    own = {"report.html", "run.json", "events.jsonl", "report.txt", "attempt_0/0/stdout.log", "attempt_0/0/error.json"}
    assert {f"{top}/{name}" for name in own} <= names
    assert f"{top}/job.toml" not in names
    again = place.program(
        sys.executable, "-m", "phalanx", "report", "--log-dir", place.logs, "--bundle", "-o", "/dev/null"
    )
    assert again.status == 0


def test_a_trace_has_a_slice_for_each_rank_and_attempt(place: Place) -> None:
    place.run("--nproc-per-node", 2, "--max-restarts", 1, place.write(FAILS))
    trace = json.loads(report(place, "--perfetto", "-o", "-").out)["traceEvents"]
    slices = {(event["tid"], event["name"].partition(":")[0]) for event in trace if event["ph"] == "X"}
    assert slices == {(tid, f"attempt {number}") for tid in (0, 1, 2) for number in (0, 1)}
    assert all(event["dur"] >= 0 for event in trace if event["ph"] == "X")
    assert any(event["ph"] == "i" and event["cat"] == "restart" for event in trace)


@pytest.mark.parametrize("options", [[], ["--log-max-size", "300kB"], ["--log-max-size", "300kB", "--log-compress"]])
@pytest.mark.parametrize("has_timeline", [True, False])
def test_the_log_of_a_page_is_the_end_of_each_ranks_log(place: Place, options: list[str], has_timeline: bool) -> None:
    script = place.write("""
        import os
        for number in range(40_000):
            os.write(1, b"%d %s\\n" % (number, b"x" * 60))
        """)
    place.run("--on-report", "never", "--nproc-per-node", 2, "-r", 3, *options, script)
    if not has_timeline:
        (folder(place) / "attempt_0" / "timeline").unlink()
    found = lines_of(page := report(place, "--html", "-o", "-").out)
    for rank in ("0", "1"):
        numbers = [int(text.partition(" ")[0]) for owner, text in found if owner == rank]
        assert numbers == [*range(40_000 - len(numbers), 40_000)]  # none, if it had ended long before the other
    assert 3_000 < len(found) <= 20_000
    assert "These are the last " in page


def test_what_a_page_brings_is_what_its_readme_says() -> None:
    assets = resources.files("phalanx._page").joinpath("assets")
    hashes = re.findall(
        r"^([0-9a-f]{64})  (\S+)$", assets.joinpath("README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(hashes) == 3
    for expected, name in hashes:
        assert hashlib.sha256(assets.joinpath(name).read_bytes()).hexdigest() == expected


def test_a_run_that_still_runs_has_a_page(place: Place) -> None:
    script = place.write("import sys; print('there', flush=True); sys.stdin.read()")
    with place.start("--stdin", "0", script, stdin=-1) as launcher:
        launcher.read_until("there", "stdout")
        page = report(place, "--html", "-o", "-").out
        assert "still running" in page
        assert "and does not change" in page
        for part in ("connect-src", "EventSource", "fetch(", "Idiomorph", "data-version"):  # as a live page has
            assert part not in page
        assert launcher.end().status == 0


def test_a_command_line_that_is_left_behind_has_no_secrets(place: Place) -> None:
    script = place.write("""
        import os, time
        there, ready = os.pipe()
        if os.fork() == 0:
            os.setsid()
            os.write(ready, b"x")
            time.sleep(60)
        os.read(there, 1)
        raise ValueError
        """)
    done = place.run("-r", 3, script, "--api-key", "opensesame")
    report(place, "--bundle", "-o", place.folder / "it.tgz")
    with tarfile.open(place.folder / "it.tgz") as archive:
        files = {name: archive.extractfile(name) for name in archive.getnames()}
        texts = [file.read().decode(errors="replace") for file in files.values() if file is not None]
    assert "ended what was left behind" in done.err
    assert any("left the process" in text and "--api-key (left out)" in text for text in texts)
    assert not [text for text in (done.err, *texts) if "opensesame" in text]


def test_a_rank_whose_end_nobody_has_seen_is_lost(place: Place) -> None:
    script = place.write("import time; print('there', flush=True); time.sleep(60)")
    with place.start("--nproc-per-node", 2, script) as launcher:
        launcher.read_until("there", "stdout")
        until(lambda: [len(attempt["ranks"]) for attempt in record(place)["attempts"]] == [2])
        launcher.process.kill()
        launcher.end()
    page = report(place, "--html", "-o", "-").out
    assert "last seen after" in page
    assert set(re.findall(r'<span class="chip s-(\w+)">', page)) == {"lost"}


def test_events_of_a_worker_stay_within_bounds(place: Place) -> None:
    place.run("--on-report", "never", "--nproc-per-node", 2, place.write(FAILS))
    path = folder(place) / "run.json"
    run = record(place)
    run["attempts"][0]["ended"] = run["attempts"][0]["started"] - 3600  # the clock was set back
    run["attempts"][0]["ranks"] = [rank | {"state": "running"} for rank in run["attempts"][0]["ranks"]]
    path.write_text(json.dumps(run))
    event: dict[str, Any] = {"timestamp": time.time(), "attempt": 0}
    events = [{"name": "worker.noticed", **event, "rank": 2 * number} for number in range(10_000)]
    events += [{"name": "worker.exited", **event, "rank": 0, "state": "evil \u202e\x1b[31m", "exitcode": 1}]
    events += [{"name": "group.swept", **event, "rank": 0, "pid": 10**4000, "command": "x"}]
    with (folder(place) / "events.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(one)}\n" for one in events)
    page = report(place, "--html", "-o", "-").out
    assert len(page) < 200_000
    assert "evil" not in page
    trace = json.loads(report(place, "--perfetto", "-o", "-").out)["traceEvents"]
    assert len(trace) < 100
    assert all(event["dur"] >= 0 for event in trace if event["ph"] == "X")


def test_a_log_that_unpacks_to_more_than_its_size_is_cut(place: Place) -> None:
    place.run("--on-report", "never", "-r", 3, place.write(FAILS))
    attempt = folder(place) / "attempt_0"
    (attempt / "timeline").unlink()
    log = attempt / "0" / "stdout.log.1.gz"
    log.write_bytes(4 * gzip.compress(b"a" * (16 << 20)) + gzip.compress(b""))  # its size is that of its last part
    (found,) = re.findall(r"… ([0-9,]+) more characters", report(place, "--html", "-o", "-").out)
    assert int(found.replace(",", "")) < 16 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a file of another user")
def test_a_page_follows_no_link_of_strangers(place: Place) -> None:
    place.run("--on-report", "never", "-r", 3, place.write(FAILS))
    whole, other = folder(place), 65534
    rank, secret = whole / "attempt_0" / "0", place.folder / "secret"
    rank.rename(secret)
    rank.symlink_to(secret)
    assert report(place, whole, "--html", "-o", "-").status == 0
    for path in (whole, rank):
        os.chown(path, other, other, follow_symlinks=False)
    for form in ([], ["--html", "-o", "-"], ["--bundle", "-o", "-"]):
        expected = f"Error: {rank} is a link of another user, which is not followed\n"
        assert report(place, whole, *form) == (1, "", expected)


VALUES: tuple[Any, ...] = (
    None,
    -1,
    0,
    2**31,
    2**63,
    2**70,
    1e308,
    "",
    "x" * 1000,
    [],
    {},
    [[]],
    True,
    "\x1b[31m<script>",
)


def damaged(chance: random.Random, value: Any) -> Any:
    """The same value of JSON, with some of its parts replaced or left out."""
    if chance.random() < 0.08:
        return chance.choice(VALUES)
    if isinstance(value, dict):
        return {name: damaged(chance, one) for name, one in value.items() if chance.random() > 0.02}
    return [damaged(chance, one) for one in value] if isinstance(value, list) else value


def damage(chance: random.Random, path: Path) -> None:
    """Damage a file, or replace it with something that is none."""
    data, how = path.read_bytes(), chance.random()
    if how < 0.4 and ".json" in path.name:
        lines = [json.dumps(damaged(chance, json.loads(line))) for line in data.splitlines() if line.strip()]
        path.write_text("\n".join(lines))
    elif how < 0.5:
        path.write_bytes(bytes(byte if chance.random() > 0.01 else chance.randrange(256) for byte in data))
    elif how < 0.6:
        path.unlink()
        if how < 0.53:
            path.mkdir()
        elif how < 0.56:
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")


def test_whatever_is_damaged_there_is_a_page(place: Place) -> None:
    place.run("--on-report", "never", "--nproc-per-node", 2, "--max-restarts", 1, "-r", 3, place.write(FAILS))
    whole, now = folder(place), time.time()
    row = {"attempt": 0, "ranks": [0, 1], "cpu": [1.0, 2.0], "memory": [1 << 20, None], "step": [3, 4]}
    rows = [json.dumps({"time": now + number, **row}) for number in range(9)]
    (whole / "samples.jsonl").write_text("\n".join(rows))
    for seed in range(int(os.environ.get("PHALANX_ROUNDS", "12"))):
        chance, copy = random.Random(seed), place.folder / f"copy {seed}"  # noqa: S311 - to be the same again
        shutil.copytree(whole, copy, ignore=shutil.ignore_patterns("*.sock"))
        for path in sorted(one for one in copy.rglob("*") if one.is_file()):
            damage(chance, path)
        done = report(place, copy, "--html", "-o", "-")
        assert done[::2] == (0, ""), (seed, done)
        assert done.out.endswith("</html>"), seed
        assert "\x1b" not in done.out, seed
        json.loads(report(place, copy, "--perfetto", "-o", "-").out)
