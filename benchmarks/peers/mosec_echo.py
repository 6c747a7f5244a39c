"""mosec serving a JSON echo: one worker process, batches of up to 64, 1 ms wait (its best here)."""

from __future__ import annotations

from typing import Any

from mosec import Server, Worker


class Echo(Worker):
    """Returns what it is given; mosec decodes and encodes JSON."""

    def forward(self, data: list[Any]) -> list[Any]:
        return data


if __name__ == "__main__":
    server = Server()
    server.append_worker(Echo, num=1, max_batch_size=64, max_wait_time=1)
    server.run()
