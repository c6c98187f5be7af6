"""What a failing process leaves about itself: error files, stacks of fatal signals, and how they are read back.

Its modules are loaded by their path too, in whatever Python a user's script runs (3.8 or later).
"""
