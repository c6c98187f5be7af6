"""Phalanx: groups of worker processes that start together, live together and fall together, the true cause named.

The public names live in the modules that carry them: `phalanx.multiprocessing`, `phalanx.multiprocessing.errors`,
`phalanx.spawn`, and the command ``phalanx run``. `phalanx.warm` is at hand here. Importing this package alone imports
nothing else.

>>> import phalanx
>>> with phalanx.warm(preload=["json"]) as process:
...     process.preload
('json',)
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.multiprocessing import warm

__all__ = ["__version__", "warm"]

__version__ = "0.1.0"


def __getattr__(name: str) -> "Any":
    if name == "warm":
        from phalanx.multiprocessing import warm

        return warm
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
