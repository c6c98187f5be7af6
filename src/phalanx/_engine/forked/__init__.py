"""Runs in the fork server: the process that imports what workers will need, and forks their keepers."""
