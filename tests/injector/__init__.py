"""A fault injector: it starts groups, brings faults about from outside, and checks what Phalanx guarantees.

A seed makes a `plan`: a group, what its workers do, and the faults that befall launcher, guard, keeper, log writer and
workers. `run` carries it out in a process of its own, `check` says which guarantees were broken. By hand::

    python -m tests.injector --seeds 0-999 --jobs 3
    python -m tests.injector --seed 17 -v

The same seed always makes the same plan. The course of a run differs from time to time, because the kernel schedules
processes as it likes.
"""
