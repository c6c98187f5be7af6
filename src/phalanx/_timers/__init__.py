"""Timers in shared memory: `scheduler` decides when one expires, `escalation` what happens then."""
