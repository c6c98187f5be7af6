"""Runs in workers: what stands between the interpreter and the user's code."""
