"""Groups of processes: starts, watches, signals and reaps them. Standard library only.

The folders are processes: `keeper` runs in guard and keeper, `rotation` in the process that fills log files of bounded
size, `forked` in the fork server, `worker` in workers. The modules beside them run in the launcher; `lifecycle` and
`protocol` are shared. Nothing is imported here: each import would delay the start of one of these processes.
"""
