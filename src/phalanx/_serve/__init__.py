"""The server of live pages, ``phalanx serve``: it reads the folders of runs, and has no part in any run."""

TOKEN_ENV = "PHALANX_SERVE_TOKEN"  # noqa: S105 - the variable's name
"""The variable that has the server's token, if that is not to be a random one."""
