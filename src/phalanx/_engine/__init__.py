"""Groups of processes: starts, watches, signals and reaps them. Standard library only.

The folders are processes: `keeper` runs in guard and keeper, `rotation` in the process that fills log files of bounded
size, `worker` in workers. What lies beside them runs in the launcher. Nothing is imported here: each import is on
somebody's start-up path.
"""
