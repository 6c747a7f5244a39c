"""Pipelines as under a portal, without one."""

import asyncio
from typing import Any, cast

from penstock.core.engine.inbox import RequestInbox


def portal_inbox() -> RequestInbox:
    """Makes the running loop one of a portal: the threads of nodes pass items on. Who submits holds its `guard`."""
    inbox = RequestInbox(asyncio.get_running_loop())
    inbox.backend = cast("Any", None)  # nobody puts a request into it
    return inbox
