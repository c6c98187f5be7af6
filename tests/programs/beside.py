"""What a program imports from beside itself, found through ``sys.path[0]``."""

from __future__ import annotations

imported_as = __name__


class Tool:
    """Of a module that workers import by its name."""

    def __init__(self, size: int) -> None:
        self.size = size

    def use(self, rank: int) -> str:
        return f"tool of size {self.size}, used by {rank}"
