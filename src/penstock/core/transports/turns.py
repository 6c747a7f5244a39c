"""Turns: two threads that receive from one socket, one at a time, and hand its batches to the thread that runs them.

Whoever holds the lock receives one message and queues its batch before letting go. The main thread takes queued batches
first; it receives by itself only after a brief batch, with the lock held and the queue empty. The reader waits for its
turn after it has queued a batch while batches are brief, because the main thread will then look at the socket itself.
Before it does anything that may take long (waiting for the queue, a batch that is not brief, a part of a stream), the
main thread gives the reader its turn. A turn that comes before the reader waits is kept, so no wake-up is lost: at
worst the reader receives once more than it had to.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Lock
from typing import Generic, TypeVar

W = TypeVar("W")


class Turns(Generic[W]):
    """`receive` takes one message: True if it queued a batch with `put`, None at the end of the socket."""

    def __init__(self, receive: Callable[[], bool | None]) -> None:
        self.brief = False  # the last batch was short; set by the main thread
        self._receive = receive
        self._queue: SimpleQueue[W | None] = SimpleQueue()
        self._lock = Lock()  # of whoever receives
        self._turn = Event()  # of the reader

    def put(self, work: W | None) -> None:
        """Queues a batch; None if no more will come."""
        self._queue.put(work)

    def next(self) -> W | None:
        """The main thread's next batch; None if no more will come."""
        queue = self._queue
        while self.brief and queue.empty() and self._lock.acquire(blocking=False):
            try:
                # looked at again, because the reader may have queued a batch before it let go
                if queue.empty() and self._receive() is None:
                    break
            finally:
                self._lock.release()
        if not self.brief or queue.empty():
            self.give()
        return queue.get()

    def give(self) -> None:
        """Gives the reader its turn, if it waits or is about to."""
        self._turn.set()

    def read(self) -> None:
        """The reader thread's loop. Returns at the end of the socket."""
        while True:
            with self._lock:
                queued = self._receive()
            if queued is None:
                return
            if queued and self.brief:
                self._turn.wait()
                self._turn.clear()
