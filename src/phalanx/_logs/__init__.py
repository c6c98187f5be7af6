"""From the workers' log files to somebody's eyes: following, prefixes, filters, the console; and merging them later."""
