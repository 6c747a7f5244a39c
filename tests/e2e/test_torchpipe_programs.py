"""Programs around a pipe: they fork, are patched by gevent, end without closing it, are interrupted."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

FORKS = """
import os, sys, warnings
import penstock.torchpipe as torchpipe

pipe = torchpipe.pipe({"a": {"backend": "Identity", "next": "b"}, "b": {"backend": "Identity"}})

def call(data):
    item = {"data": data}
    pipe(item)
    event = torchpipe.Event()
    later = {"data": data, "event": event}
    pipe(later)
    assert event.wait(20_000)
    return [item["result"], later["result"]]

assert call(1) == [1, 1]
warnings.simplefilter("ignore")
children = []
for i in (2, 3):
    child = os.fork()
    if not child:
        assert call(i) == [i, i]
        sys.exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children], call(4))
"""

GREENLETS = """
from gevent import monkey
monkey.patch_all()
import time
import gevent
import penstock.torchpipe as torchpipe

class Slow:
    def forward(self, items):
        time.sleep(0.2)
        for item in items:
            item["result"] = item["data"]

torchpipe.register_backend(Slow, "slow")
pipe = torchpipe.pipe({"backend": "slow", "instance_num": 4})

turns = []

def turn():
    while True:
        turns.append(1)
        gevent.sleep(0.01)

def call(i):
    item = {"data": i}
    pipe(item)
    return item["result"]

gevent.spawn(turn)
calls = [gevent.spawn(call, i) for i in range(4)]
gevent.joinall(calls)
others = len(turns) > 1
event = torchpipe.Event(2)
items = [{"data": i, "event": event} for i in range(2)]
pipe(items)
del turns[:]
print([c.value for c in calls], others, event.wait(20_000), len(turns) > 1, [i["result"] for i in items])
"""

NEVER_ENDS = """
import time
import penstock.torchpipe as torchpipe

class Slow:
    def forward(self, items):
        print("running", flush=True)
        time.sleep(600)

torchpipe.register_backend(Slow, "slow")
pipe = torchpipe.pipe({"backend": "slow"})
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (FORKS, "[0, 0] [4, 4]"),
        (GREENLETS, "[0, 1, 2, 3] True True True [0, 1]"),
        (NEVER_ENDS + "pipe({'data': 1, 'event': torchpipe.Event()})", ""),
    ],
    ids=["forks", "greenlets", "ends"],
)
def test_an_unchanged_program_runs(program: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().removeprefix("running") == said


def test_ctrl_c_ends_a_call_that_waits(tmp_path: Path) -> None:
    """Background jobs of a shell ignore the signal, and so do their children, so Python's handler is set."""
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + NEVER_ENDS
    with subprocess.Popen(
        [sys.executable, "-c", program + "pipe({'data': 1})"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors
