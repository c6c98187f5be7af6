"""Where workers run and within which bounds: CPUs, limits, devices."""
