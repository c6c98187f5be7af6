"""A program whose main module imports nothing: how long its empty function takes in N processes, in milliseconds.

``python main_noop.py LIBRARY WAY TIMES N...`` prints a JSON object from N to the figures. WAY is where the function
is, and how it is started: ``module``, ``reference`` and ``value`` start fresh interpreters; those with ``warm`` before
fork a process that is ready.
"""

from __future__ import annotations


def noop(*_args: object) -> None:
    """Do nothing."""


if __name__ == "__main__":
    import contextlib
    import importlib
    import json
    import sys
    from time import perf_counter

    library, way, times, *sizes = sys.argv[1:]
    spawn = importlib.import_module(library).spawn
    warmly, kind = way.startswith("warm "), way.removeprefix("warm ")
    function = importlib.import_module("noop").noop if kind == "module" else noop
    options: dict[str, str] = {"main": "value"} if kind == "value" else {}
    with contextlib.ExitStack() as held:
        if warmly:
            from phalanx import warm

            held.enter_context(warm(preload=["__main__"] if kind == "reference" else []))
            options["start_method"] = "forkserver"
        spawn(function, nprocs=1, **options)  # what a library imports when it is first used is not part of it
        figures: dict[str, list[float]] = {size: [] for size in sizes}
        for size in sizes:
            for _ in range(int(times)):
                began = perf_counter()
                spawn(function, nprocs=int(size), **options)
                figures[size].append((perf_counter() - began) * 1e3)
    print(json.dumps(figures))
