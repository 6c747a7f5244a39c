from __future__ import annotations

import asyncio
import socket

import pytest

from penstock.core.transports.channel import Channel
from penstock.core.wire import messages as frames


@pytest.fixture
async def pair():
    """(channel, the peer's socket, received frames, an event that is set at the end)."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    heard, ended = [], asyncio.Event()
    channel = Channel(asyncio.get_running_loop(), ours, heard.append, ended.set)
    yield channel, theirs, heard, ended
    channel.close()
    ours.close()
    theirs.close()


async def test_unsent_bytes_are_sent_later_in_order(pair):
    channel, peer, _, _ = pair
    sent = [(b"%d" % i, [bytes([i]) * 300_000]) for i in range(20)]
    for head, buffers in sent:
        channel.send(frames.frame_of(head, buffers))
    decoder, received = frames.FrameDecoder(), []
    loop = asyncio.get_running_loop()
    while len(received) < len(sent):
        received += decoder.feed(await loop.sock_recv(peer, 2**20))
    assert [(f.head, [bytes(b) for b in f.buffers]) for f in received] == sent


async def test_a_frame_with_more_to_come_leaves_with_the_next_or_when_it_must(pair):
    channel, peer, _, _ = pair
    channel.send(frames.frame_of(b"one"), more=True)
    with pytest.raises(BlockingIOError):
        peer.recv(1)
    channel.send(frames.frame_of(b"two"))
    channel.send(frames.frame_of(b"three"), more=True)
    channel.flush()
    assert [f.head for f in frames.FrameDecoder().feed(peer.recv(2**20))] == [b"one", b"two", b"three"]


async def test_buffered_frames_stay_behind_unsent_bytes(pair):
    channel, peer, _, _ = pair
    channel.send(frames.frame_of(b"large", [b"x" * 3_000_000]))
    channel.send(frames.frame_of(b"one"), more=True)
    channel.send(frames.frame_of(b"two"))
    decoder, received = frames.FrameDecoder(), []
    while len(received) < 3:
        received += decoder.feed(await asyncio.get_running_loop().sock_recv(peer, 2**20))
    assert [f.head for f in received] == [b"large", b"one", b"two"]


async def test_frames_are_received_and_the_end_is_reported_once(pair):
    channel, peer, heard, ended = pair
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(peer, b"".join(map(bytes, frames.frame_of(b"one") + frames.frame_of(b"two", [b"x" * 10]))))
    peer.close()
    await ended.wait()
    assert [f.head for f in heard] == [b"one", b"two"]
    channel.send(frames.frame_of(b"into the void"))  # not an error: who sends hears of the death soon


async def test_draining_reads_received_frames_without_a_loop_iteration(pair):
    channel, peer, heard, ended = pair
    for i in range(100):
        peer.send(frames.frame_of(b"%d" % i)[0])
    peer.close()
    channel.drain()
    assert len(heard) == 100
    assert ended.is_set()


async def test_a_peer_that_is_gone_does_not_raise(pair):
    channel, peer, _, _ = pair
    peer.close()
    channel.send(frames.frame_of(b"late"))
