"""Groups of processes: starts, watches, signals and reaps them. Standard library only.

`keeper` runs in guard and keeper, in the process that fills log files of bounded size (`keeper.log_writer`), and in the
fork server (`keeper.fork_server`); `worker` runs in workers. The modules beside them run in the launcher; `lifecycle`
and `protocol` are shared. Nothing is imported here: each import would delay the start of one of these processes.
"""
