"""Options of lines, and streams that do not heed them because they are in no file."""

from __future__ import annotations

import pytest

from tests.support.command import Place, refused, sh, workers_said

BOTH = "echo out $RANK; echo err $RANK >&2"


def notes(err: str) -> list[str]:
    """What was said at the start, but for where the logs are."""
    lines = [line for line in err.splitlines() if line.startswith("phalanx: ")]
    return [line.removeprefix("phalanx: ") for line in lines if "logs in" not in line]


@pytest.mark.long
@pytest.mark.parametrize(
    "options,named",
    [
        (("--log-format", "json"), "--log-format json"),
        (("--grep", "x", "--ranks", "0", "--fold", "--elapsed"), "--ranks, --grep, --fold, --elapsed"),
        (("--timestamps", "--log-line-prefix-template", "$rank "), "--timestamps, --log-line-prefix-template"),
    ],
)
def test_a_stream_that_does_not_heed_an_option_is_named_once(
    place: Place, options: tuple[str, ...], named: str
) -> None:
    done = sh(place, BOTH, "-r", 1, *options, n=2)
    assert done.status == 0
    words = "stderr of ranks 0-1 is the console's own and does not heed"
    assert notes(done.err) == [f"{words} {named}; with -t 2 it would"]
    assert sorted(workers_said(done.err)) == ["err 0", "err 1"]
    heeded = sh(place, BOTH, "-r", 1, "-t", 2, *options, n=2)
    assert notes(heeded.err) == []


@pytest.mark.long
def test_only_the_ranks_and_streams_that_are_meant(place: Place) -> None:
    done = sh(place, BOTH, "-t", "0:3,1:1", "--timestamps", n=3)
    assert notes(done.err) == [
        "stdout of rank 2 is the console's own and does not heed --timestamps; with -t 1 it would",
        "stderr of ranks 1-2 is the console's own and does not heed --timestamps; with -t 2 it would",
    ]
    done = sh(place, BOTH, "-t", "0:3,1:1", "--timestamps", "--local-ranks-filter", 0, n=3)
    assert notes(done.err) == []


@pytest.mark.long
def test_nothing_is_said_where_nothing_was_asked(place: Place) -> None:
    for options in (("-r", 1, "--color", "always"), ("-r", 3, "--grep", "x"), ("--grep", "x")):
        assert notes(sh(place, BOTH, *options).err) == []


def test_json_among_which_raw_lines_would_be_is_refused(place: Place) -> None:
    words = "--log-format json: stdout of ranks 0-1 would be among it as it is; add -t 1, or -r 1"
    refused(sh(place, BOTH, "-t", 2, "--log-format", "json", n=2), words)
    assert not place.logs.exists()


def test_filters_of_a_stream_that_is_in_no_file_are_refused(place: Place) -> None:
    words = "--duplicate-stderr-filters: stderr of ranks 0-1 goes to no file; add -t 2, or -r 2"
    refused(sh(place, BOTH, "-r", 1, "--duplicate-stderr-filters", "err", n=2), words)
    assert not place.logs.exists()
    done = sh(place, BOTH, "-t", "0:3", "--duplicate-stderr-filters", "err", n=2)
    words = "--duplicate-stderr-filters: stderr of rank 1 goes to no file; add -t 2, or -r 2"
    assert notes(done.err) == [words]
    (path,) = place.logs.glob("*/attempt_0/filtered_stderr.log")
    assert path.read_text() == "[0] err 0\n"
