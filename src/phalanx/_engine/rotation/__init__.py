"""Runs in a process of its own, which fills log files of bounded size."""
