"""Log files of workers: where they are, how they are followed and shown on the console, and merged later."""
