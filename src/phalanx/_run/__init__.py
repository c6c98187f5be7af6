"""What a run has beside the loop that carries it: its workers and their record, services, checks, torch's events."""
