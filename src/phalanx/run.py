"""``torch.distributed.run``, for programs that call it; ``python -m phalanx.run`` is ``phalanx run``.

>>> from phalanx.run import get_args_parser, main, run
>>> main(["--no-python", "--log-dir", "/dev/null", "true"])
>>> run(get_args_parser().parse_args(["--no-python", "--log-dir", "/dev/null", "true"]))
"""

from __future__ import annotations

from phalanx.cli.run import main
from phalanx.cli.torchrun_shim import get_args_parser, run

__all__ = ["get_args_parser", "main", "run"]

if __name__ == "__main__":
    from phalanx.cli.run import run as command

    command(prog_name="phalanx run")
