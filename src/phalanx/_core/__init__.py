"""The engine: starts, watches, signals and reaps groups of processes. Standard library only.

It knows what a process, a descriptor, a deadline and a line of bytes are. It does not know what a
rank means to a job, what an agent decides, or what a command line looks like. Nothing is imported here: the keeper
and the workers import single modules of this package, and each import is on somebody's start-up path.
"""
