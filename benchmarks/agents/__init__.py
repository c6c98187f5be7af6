"""Agents of a job in few processes: those of Phalanx, torch's rendezvous, and bare sockets. One protocol for all three.

`crowd` starts the processes and hears them; `__main__` is one of them; `ours`, `theirs` and `bare` are the agents.
"""
