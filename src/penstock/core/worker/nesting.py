"""Workers that start workers of their own: allowed in a loaded model, refused where it would never end."""

import os

from penstock.errors import LoadFailed

DEPTH_VARIABLE = "_PENSTOCK_WORKER_DEPTH"  # in the environment of a worker: how many workers it is nested in
MAX_DEPTH = 5

importing = 0  # in a worker, the thread that imports the module of its model


def may_start_workers() -> int:
    """The depth of this process: 0 outside of workers. Raises LoadFailed if it must not start a worker."""
    if importing:
        raise LoadFailed(
            "the module of the model starts workers while a worker imports it, so that workers would start workers of"
            " their own without end: start them in a function, or under if __name__ == '__main__'"
        )
    depth = int(os.environ.get(DEPTH_VARIABLE, "0"))
    if depth >= MAX_DEPTH:
        raise LoadFailed(
            f"workers have started workers of their own {depth} levels deep: a model must not start itself"
        )
    return depth
