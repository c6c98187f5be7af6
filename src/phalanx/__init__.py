"""Phalanx: groups of worker processes that start together, live together and fall together, the true cause named.

The public names live in the modules that carry them: `phalanx.multiprocessing`, `phalanx.multiprocessing.errors`,
and the command ``phalanx run``. Importing this package alone imports nothing else.
"""

__version__ = "0.1.0"
