from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

from penstock.core import native

PROGRAM = """
    from gevent import monkey
    monkey.patch_all()
    import os, sys, threading
    from penstock.core import native

    main = native.thread_id()
    answers, done = native.new_queue(), native.new_lock()
    done.acquire()

    def in_a_thread(word):
        answers.put((word, native.thread_id()))
        done.release()

    native.start_thread(in_a_thread, "hello", name="mine")
    done.acquire()  # a greenlet of this thread would never run now
    word, other = answers.get()
    assert word == "hello" and other != main, (word, other)
    ours, theirs = native.socketpair()
    ours.setblocking(False)
    try:
        ours.recv(1)
    except BlockingIOError:
        pass
    theirs.sendall(b"x")
    assert ours.recv(1) == b"x"
    process = native.popen([sys.executable, "-c", "print(6 * 7)"], stdout=-1)
    assert process.stdout.read() == b"42\\n" and process.wait() == 0
    print("fine", native.patched())
"""


def test_threads_are_threads_in_a_program_that_gevent_has_patched() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "fine True\n", done.stderr


def test_elsewhere_they_are_the_plain_ones() -> None:
    assert not native.patched()
    told: list[tuple[str, bool]] = []
    ended = native.new_lock()
    ended.acquire()

    def run() -> None:
        told.append((threading.current_thread().name, threading.current_thread().daemon))
        ended.release()

    native.start_thread(run, name="mine")
    ended.acquire()
    assert told == [("mine", True)]
    assert native.thread_id() == threading.get_ident()
    ours, theirs = native.socketpair()
    with ours, theirs:
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"
    assert native.popen([sys.executable, "-c", ""], cwd=os.getcwd()).wait() == 0
