"""Programs written as the users of torchrun write them, each with the same faults, under torchrun and under Phalanx.

``programs`` has them. Nothing is fetched: they run in an interpreter that has what they import.
"""
