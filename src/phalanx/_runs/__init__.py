"""What a run leaves on disk: its folder, its record, and how runs are found and removed."""
