"""The stacks of live processes: collected from many at once, parsed, compared."""
