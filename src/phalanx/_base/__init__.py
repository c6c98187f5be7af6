"""Linux, time and plumbing: kernel calls, clocks, the loop, channels. Knows nothing of groups or ranks' work.

Standard library only. Nothing is imported here: keeper and workers import single modules of this package, and each
import is on somebody's start-up path.
"""
