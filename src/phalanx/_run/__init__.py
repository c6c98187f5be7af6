"""What carries a run: the loop, its workers, and what it tells of itself."""
