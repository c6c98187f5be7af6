"""The server of live pages, ``phalanx serve``: it reads the folders of runs, and has no part in any run."""
