"""Deadlines in shared memory, and what follows when one expires."""
