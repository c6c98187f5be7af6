"""A group as its owner holds it: started, waited for, closed. `multiprocessing` and `spawn` are its faces."""
