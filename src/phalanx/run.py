"""``torch.distributed.run``, for programs that call its ``main``; ``python -m phalanx.run`` is ``phalanx run``.

>>> from phalanx.run import main
>>> main(["--no-python", "--log-dir", "/dev/null", "true"])
"""

from __future__ import annotations

from phalanx.cli.run import main

__all__ = ["main"]

if __name__ == "__main__":
    from phalanx.cli.run import run

    run(prog_name="phalanx run")
