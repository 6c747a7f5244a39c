"""`import torchpipe` in programs that stay as they are."""

from __future__ import annotations

import sys

from penstock.core.import_alias import installed, make_importable

NAME = "torchpipe"
OURS = "penstock.torchpipe"


def install() -> None:
    """Makes `import torchpipe`, and of modules in it, give this package, in this process. To be called before they are.

    Raises ImportError when a torchpipe is installed, or another one was imported: nothing takes its place.
    """
    if sys.modules.get(NAME) is sys.modules[OURS]:
        return
    if NAME in sys.modules or installed(NAME):
        raise ImportError(
            "another torchpipe is installed: uninstall it, or write `import penstock.torchpipe as torchpipe`"
        )
    make_importable(NAME, OURS)
