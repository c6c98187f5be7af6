"""What a failing process leaves about itself: error files, stacks of fatal signals, and how they are read back.

The worker's part of it (`error_file`, `describe`, `recording`, `stack_signals`) also runs in whatever
Python a user's script has (3.8 or later), where `phalanx._engine.worker.script` imports it without this ``__init__``.
"""
