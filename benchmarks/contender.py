"""The fresh interpreter of one run: ``python -m benchmarks.contender CASE CONTENDER [SIZE]`` prints figures as JSON.

Imports little: what is imported here is in the memory measured, and function workers import it once more.
"""

import sys


def main(case: str, contender: str, *sizes: str) -> None:
    """Measure, and print the sample as the last line of standard output."""
    from benchmarks.cases import load  # a spawned worker imports this module, and needs none of it

    sample = load(case).contenders[contender](*map(int, sizes))

    import json  # after measuring

    sys.stdout.write("\n" + json.dumps(sample._asdict()) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
