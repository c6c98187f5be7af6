"""What became of workers and of their group: outcomes, failures, the result, the report."""
