"""The store in the agent of rank 0: nothing is installed, and nothing is kept. For jobs with ``--master-addr``."""
