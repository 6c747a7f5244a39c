"""The names of everything that one model has in a broker."""

from __future__ import annotations

from msgspec import Struct

GROUP = "workers"
"""The one consumer group of a queue."""

RELEASED = "released"
"""The consumer that entries are handed to by a worker that ends; it is nobody."""


class Keys(Struct, frozen=True):
    """`prefix` keeps models apart that share a broker. The braces put the keys of a model on one node of a cluster."""

    prefix: str = ""

    @property
    def queue(self) -> str:
        """The stream of the requests that wait or run."""
        return self._name("queue")

    @property
    def dead(self) -> str:
        """The stream of what was given up: malformed, or there in two deaths of workers."""
        return self._name("dead")

    def replies(self, client: str) -> str:
        """The stream of the answers for one client."""
        return self._name(f"replies:{client}")

    def sent(self, client: str) -> str:
        """The last parcel of one client: its number, and the ids that its entries got."""
        return self._name(f"sent:{client}")

    def _name(self, what: str) -> str:
        return f"{{penstock:{self.prefix}}}:{what}"
