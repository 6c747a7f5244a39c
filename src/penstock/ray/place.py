"""The working folder and the module paths of the program, for processes of the cluster that find them there."""

import os
import sys

from msgspec import Struct


class Place(Struct, frozen=True):
    """Where a process looks for the files and modules that a target names."""

    folder: str
    paths: list[str]


def here() -> Place:
    folder = os.getcwd()
    return Place(folder, [path or folder for path in sys.path])


def enter(place: Place) -> None:
    """Makes this process look there too. A node without the folder keeps its own, such as a `working_dir` of Ray's."""
    if os.path.isdir(place.folder):
        os.chdir(place.folder)
    sys.path += [path for path in place.paths if path not in sys.path]
