import os
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from penstock.core import os_threads

PROGRAM = """
    from gevent import monkey
    monkey.patch_all()
    import os, sys, threading
    from penstock.core import os_threads

    main = os_threads.thread_id()
    answers, done = os_threads.new_queue(), os_threads.new_lock()
    done.acquire()

    def in_a_thread(word):
        answers.put((word, os_threads.thread_id()))
        done.release()

    os_threads.start_thread(in_a_thread, "hello", name="mine")
    done.acquire()  # a greenlet of this thread would never run now
    word, other = answers.get()
    assert word == "hello" and other != main, (word, other)
    ours, theirs = os_threads.socketpair()
    ours.setblocking(False)
    try:
        ours.recv(1)
    except BlockingIOError:
        pass
    theirs.sendall(b"x")
    assert ours.recv(1) == b"x"
    process = os_threads.popen([sys.executable, "-c", "print(6 * 7)"], stdout=-1)
    assert process.stdout.read() == b"42\\n" and process.wait() == 0
    print("fine", os_threads.patched())
"""


def test_threads_are_threads_in_a_program_that_gevent_has_patched() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "fine True\n", done.stderr


def test_a_detached_process_has_its_files_and_no_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import os
if os.fork() == 0:
    os.setsid()
    assert os.read(0, 9) == b"question", "it is read from the descriptor that was given as the first"
    assert os.environ["DETACHED"] == "yes"
    os.write(3, b"%d %d" % (os.getppid(), os.getsid(0) == os.getpid()))
"""
    monkeypatch.setenv("DETACHED", "yes")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        files = {0: theirs.fileno(), 3: theirs.fileno()}
        os_threads.run_detached([sys.executable, "-c", program], files)
        theirs.close()
        ours.settimeout(20)
        ours.sendall(b"question")
        parent, leads = ours.recv(100).split()
        assert int(parent) != os.getpid()
        assert leads == b"1"
        assert ours.recv(1) == b"", "nothing else holds its end"


def test_elsewhere_they_are_the_plain_ones() -> None:
    assert not os_threads.patched()
    told: list[tuple[str, bool]] = []
    ended = os_threads.new_lock()
    ended.acquire()

    def run() -> None:
        told.append((threading.current_thread().name, threading.current_thread().daemon))
        ended.release()

    os_threads.start_thread(run, name="mine")
    ended.acquire()
    assert told == [("mine", True)]
    assert os_threads.thread_id() == threading.get_ident()
    ours, theirs = os_threads.socketpair()
    with ours, theirs:
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"
    assert os_threads.popen([sys.executable, "-c", ""], cwd=os.getcwd()).wait() == 0


def test_the_exit_waits_for_threads_that_run_models_but_not_for_ever() -> None:
    program = """
import sys, threading, time
from penstock.core import os_threads

os_threads.EXIT_S = 1.0
asked, never = threading.Event(), threading.Event()

def model():
    asked.wait()
    print("left", flush=True)

def loops():
    try:
        while True:
            time.sleep(0.001)
    finally:
        print("interrupted", flush=True)

os_threads.start_thread(never.wait, name="plain")
os_threads.start_thread(model, name="model", leave=asked.set)
if sys.argv[1] != "leaves":
    os_threads.start_thread({"loops": loops, "hangs": never.wait}[sys.argv[1]], name="other", leave=lambda: None)
time.sleep(0.05)
print(time.monotonic())
"""
    for state, least_s, words in (
        ("leaves", 0, ["left"]),
        ("loops", 0.5, ["left", "interrupted"]),
        ("hangs", 1, ["left"]),
    ):
        done = subprocess.run([sys.executable, "-c", program, state], capture_output=True, text=True, timeout=30)
        began_s, *said = done.stdout.split()
        assert (done.returncode, done.stderr, said) == (0, "", words)
        assert least_s <= time.monotonic() - float(began_s) < 20
