"""The store in one of the job's own agents: nothing is installed, and nothing is kept. For `static` and `c10d`."""
