"""What happens to a run, as one stream of typed events, and the file that has them all."""
