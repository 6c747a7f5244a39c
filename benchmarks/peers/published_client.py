"""The three ways in which the published pipeline sends a video: published_client.py URL VIDEO --mode MODE

As in the original, everything runs on the event loop (decoding with OpenCV, colours, stacking, pickling), and every
request opens its own connection. Unlike the original, answers are parsed and counted instead of evaluated, and no
sender exits before all frames are read. Prints one JSON object: captions, bytes of all bodies, seconds from the first
frame to the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import sys
import time
import warnings
from collections.abc import Iterator

import aiohttp
import cv2
import numpy as np

ROUND = 50
AT_ONCE = 500
QUEUE = 10
POSTERS = 10


class Client:
    """A server's URL, and statistics of what was sent."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.sent_bytes = 0

    async def post(self, frames: np.ndarray) -> list[str]:
        body = pickle.dumps(frames)
        self.sent_bytes += len(body)
        async with aiohttp.ClientSession() as session, session.post(self.url, data=body) as response:
            answer = await response.text()
            if response.status != 200:
                raise SystemExit(f"status {response.status}: {answer[:300]}")
        found = json.loads(answer)
        return found if isinstance(found, list) else [found]


def read(path: str, most: int) -> Iterator[np.ndarray]:
    """RGB frames."""
    video = cv2.VideoCapture(path)
    for _ in range(min(most, int(video.get(cv2.CAP_PROP_FRAME_COUNT)))):
        found, frame = video.read()
        if not found:
            return
        yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)


async def single(client: Client, frames: Iterator[np.ndarray], _: int) -> list[str]:
    """Rounds: decodes 50 frames, posts each one alone, and waits for all."""
    captions: list[str] = []
    while True:
        batch: np.ndarray | None = None
        for frame in frames:
            batch = frame[None] if batch is None else np.concatenate((batch, frame[None]))
            if len(batch) == ROUND:
                break
        if batch is None:
            return captions
        for found in await asyncio.gather(*(client.post(frame) for frame in batch)):
            captions += found


async def stream_single(client: Client, frames: Iterator[np.ndarray], _: int) -> list[str]:
    """Up to 500 frames in flight, each alone."""
    limit = asyncio.Semaphore(AT_ONCE)
    tasks = []

    async def caption(frame: np.ndarray) -> list[str]:
        try:
            return await client.post(frame)
        finally:
            limit.release()

    for frame in frames:
        await limit.acquire()
        tasks.append(asyncio.create_task(caption(frame)))
    return [text for found in await asyncio.gather(*tasks) for text in found]


async def stream_prebatch(client: Client, frames: Iterator[np.ndarray], prebatch: int) -> list[str]:
    """A queue of 10 stacked arrays, and 10 senders that drain it."""
    queue: asyncio.Queue[tuple[int, np.ndarray] | None] = asyncio.Queue(QUEUE)
    found: dict[int, list[str]] = {}

    async def poster() -> None:
        while (taken := await queue.get()) is not None:
            number, batch = taken
            found[number] = await client.post(batch)

    posters = [asyncio.create_task(poster()) for _ in range(POSTERS)]
    gathered: list[np.ndarray] = []
    number = 0
    for frame in frames:
        gathered.append(frame)
        if len(gathered) == prebatch:
            await queue.put((number, np.array(gathered)))
            number, gathered = number + 1, []
    if gathered:
        await queue.put((number, np.array(gathered)))
    for _ in posters:
        await queue.put(None)
    await asyncio.gather(*posters)
    return [text for number in sorted(found) for text in found[number]]


MODES = {"single": single, "stream-single": stream_single, "stream-prebatch": stream_prebatch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("video")
    parser.add_argument("--mode", choices=MODES, default="stream-prebatch")
    parser.add_argument("--prebatch", type=int, default=32)
    parser.add_argument("--frames", type=int, default=sys.maxsize)
    options = parser.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)  # aiohttp's, of bodies of more than 1 MiB
    client = Client(options.url)
    began = time.monotonic()
    captions = asyncio.run(MODES[options.mode](client, read(options.video, options.frames), options.prebatch))
    seconds = time.monotonic() - began
    print(json.dumps({"captions": captions, "sent_bytes": client.sent_bytes, "seconds": seconds}))


if __name__ == "__main__":
    main()
