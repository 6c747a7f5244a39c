"""The end of a connection, on the loop that Penstock runs on."""

import asyncio
import socket

import uvloop

from penstock.core.transports.process import Channel
from penstock.core.wire.messages import Frame, frame_of


def test_the_end_of_a_peer_that_has_not_read_everything_is_noticed_after_its_last_words() -> None:
    """The kernel reports the reset together with the data, and libuv reports nothing afterwards."""

    async def scenario() -> list[Frame]:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        frames: list[Frame] = []
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        channel = Channel(loop, ours, frames.append, ended.set, drains=True)
        channel.send(frame_of(b"unread"))
        theirs.sendall(b"".join(map(bytes, frame_of(b"last words"))))
        theirs.close()
        await asyncio.wait_for(ended.wait(), 20)
        ours.close()
        return frames

    for run in (asyncio.run, uvloop.run):
        assert [frame.head for frame in run(scenario())] == [b"last words"]


def test_a_frame_that_is_too_large_ends_the_channel() -> None:
    async def scenario() -> None:
        ended = asyncio.Event()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            Channel(asyncio.get_running_loop(), ours, lambda frame: None, ended.set)
            theirs.sendall(b"\xff" * 100)
            await asyncio.wait_for(ended.wait(), 20)

    uvloop.run(scenario())
