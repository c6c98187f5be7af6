"""What a script observes when a launcher starts it: printed as one line of JSON. Runs with and without Phalanx."""

import json
import os
import pickle
import sys


def function() -> None:
    """Stand for what a script pickles by reference."""


print(
    json.dumps(
        {
            "argv": sys.argv,
            "__name__": __name__,
            "__file__": __file__,
            "__package__": __package__,
            "path0": sys.path[0],
            "is main": vars(sys.modules["__main__"]) is globals(),
            "pickles": pickle.loads(pickle.dumps(function)) is function,
            "env": dict(os.environ),
        }
    ),
    flush=True,
)
