"""Linux, time and plumbing: kernel calls, processes, clocks, the loop, channels, files. Knows nothing of groups.

Standard library only. This file imports nothing: keeper and workers import single modules of the package as they start,
and each import takes time there.
"""
