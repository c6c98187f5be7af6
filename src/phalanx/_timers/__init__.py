"""Timers in shared memory: `table` and `client` are its ends; `escalation` decides when one expires, and what next."""
