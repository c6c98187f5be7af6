"""The function that does nothing, in a module that imports nothing: its import is part of what spawning costs."""


def noop(*_args: object) -> None:
    """Do nothing."""
