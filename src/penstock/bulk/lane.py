"""One server as the sender sees it: its window, its connections, and whether it rests."""

from __future__ import annotations

from penstock.bulk.servers import ServerInfo, authorization
from penstock.bulk.window import Window
from penstock.client.http import ClientConnection


class Lane:
    """Used on the sender's loop. `resting_until_s` and `away` keep chunks from it; `tries` counts what failed since."""

    def __init__(self, info: ServerInfo, window: Window, connect_timeout_s: float) -> None:
        self.info = info
        self.window = window
        self.path = f"{info.path}/infer"
        self.headers = [("x-priority", "1"), *authorization(info.token)]
        self.away = False  # nothing is sent before it answered when asked for its metadata
        self.resting_until_s = 0.0
        self.tries = 0
        self.answered = 0
        self.retries = 0
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[ClientConnection] = []

    def up(self, now: float) -> bool:
        """Whether it may be sent chunks, as far as its window has room."""
        return not self.away and now >= self.resting_until_s

    @property
    def load(self) -> float:
        """In flight relative to what it bears."""
        return self.window.in_flight / self.window.size

    def take(self) -> ClientConnection:
        """A connection of its own for one request."""
        if self._idle:
            return self._idle.pop()
        return ClientConnection(self.info.endpoint, connect_timeout_s=self._connect_timeout_s)

    def give(self, connection: ClientConnection) -> None:
        """The request ended; no more connections are kept than the window is wide."""
        if len(self._idle) < self.window.size:
            self._idle.append(connection)
        else:
            connection.close()

    def works(self) -> None:
        """It answered as it should."""
        self.answered += 1
        self.tries = 0

    def close(self) -> None:
        """Ends the connections that are not in use."""
        while self._idle:
            self._idle.pop().close()
