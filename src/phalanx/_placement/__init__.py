"""Placement of workers: CPUs, resource limits, devices."""
