import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.wire import messages as frames

messages = st.lists(
    st.tuples(st.binary(max_size=200), st.lists(st.binary(max_size=300), max_size=4)), min_size=1, max_size=6
)


def stream_of(sent):
    return b"".join(bytes(piece) for head, buffers in sent for piece in frames.frame_of(head, buffers))


@settings(max_examples=300, deadline=None)
@given(messages, st.data())
def test_any_cut_of_the_stream_gives_the_same_messages(sent, data):
    stream = stream_of(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    decoder = frames.FrameDecoder()
    received = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += decoder.feed(stream[start:stop])
    assert [(f.head, [bytes(b) for b in f.buffers]) for f in received] == sent


@settings(max_examples=30, deadline=None)
@given(messages)
def test_single_bytes_give_the_same_messages(sent):
    decoder = frames.FrameDecoder()
    received = [f for byte in stream_of(sent) for f in decoder.feed(bytes([byte]))]
    assert [(f.head, [bytes(b) for b in f.buffers]) for f in received] == sent


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_noise_gives_messages_or_a_frame_error_and_nothing_else(noise):
    decoder = frames.FrameDecoder(max_bytes=1000)
    try:
        for frame in decoder.feed(noise):
            assert len(frame.head) + sum(map(len, frame.buffers)) <= len(noise)
    except frames.FrameError:
        pass


def test_the_receive_buffer_can_be_reused():
    decoder = frames.FrameDecoder()
    buffer = bytearray(stream_of([(b"head", [b"large"])]))
    (frame,) = decoder.feed(buffer)
    buffer[:] = bytes(len(buffer))
    assert (frame.head, frame.buffers) == (b"head", [bytearray(b"large")])


def test_large_buffers_are_sent_without_a_copy():
    large = bytes(100_000)
    assert frames.frame_of(b"head", [large])[1] is large


@pytest.mark.parametrize(
    "stream",
    [struct.pack("<II", 1001, 0), struct.pack("<IIQ", 0, 1, 2**40), struct.pack("<II", 0, 2**20)],
    ids=["head", "buffer", "number of buffers"],
)
def test_a_frame_that_is_announced_too_large_is_refused_before_memory_is_reserved(stream):
    with pytest.raises(frames.FrameError, match="expected at most"):
        frames.FrameDecoder(max_bytes=1000).feed(stream)


@pytest.mark.parametrize(
    "stream",
    [struct.pack("<II", 2**31, 0), struct.pack("<IIQ", 0, 1, 2**31), struct.pack("<II", 0, frames.MAX_BUFFERS)],
    ids=["head", "buffer", "number of buffers"],
)
def test_memory_grows_with_what_arrives_and_not_with_what_is_announced(stream):
    decoder = frames.FrameDecoder()
    tracemalloc.start()
    try:
        decoder.feed(stream)
        for _ in range(10):
            decoder.feed(bytes(10_000))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 300_000
