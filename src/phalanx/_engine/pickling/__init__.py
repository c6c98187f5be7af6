"""Functions, arguments, results and exceptions, on their way between launcher and workers."""
