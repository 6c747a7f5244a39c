"""What a process inherits, on every command: closed, full and broken standard files, arguments, paths and limits."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import termios
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import RedisStreamer
from penstock.torchserve.cli.pid_file import running_pid
from support.captioner import FakeCaptioner
from support.videos import make_clip
from support.waiting import wait_for

TLS = Path(__file__).parents[1] / "tls"
FREE_PORTS = ["--port=0", *(f"--set=server.{name}_port=0" for name in ("management", "metrics", "grpc"))]

# Research code parses its options wherever it likes. Its answer shows what it has seen.
MODEL = """
import argparse
import json
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--depth", type=int, default=4)
parser.parse_args()


class Model:
    def load(self, device):
        self.depth = parser.parse_args().depth
        import pkgv
        self.version = pkgv.V

    def predict(self, items):
        for number in (0, 1, 2):
            os.fstat(number)
        return [[self.depth, parser.parse_args().depth, self.version] for _ in items]


model = Model()


def served(items):
    model.load("cpu")
    return model.predict(items)


def handle(data, context):
    return model.load("cpu") if data is None else [json.dumps(one) for one in model.predict(data)]
"""
ANSWER = [4, 4, 7]
PROGRAM = """
import json, sys
from penstock import Streamer
from app import served

if __name__ == "__main__":
    sys.argv += ["--not", "known"]
    with Streamer(served, 4) as streamer:
        answer = streamer.predict([1])[0]
    with open("answer.json", "w") as file:
        json.dump(answer, file)
"""


class Started:
    """A command that a shell starts: `shell` follows `exec COMMAND`, `before` precedes it. `tty`: its terminal."""

    def __init__(
        self, folder: Path, command: list[str], shell: str, before: str, env: dict[str, str], tty: int | None
    ) -> None:
        read, write = os.pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - read at the end
        self.process = subprocess.Popen(
            ["bash", "-c", f'{before}\nexec "$@" {shell}', "bash", *command],
            cwd=folder,
            env={**os.environ, **env, "PENSTOCK_READY_FD": str(write)},
            pass_fds=[write],
            stdout=self._said,
            stderr=self._said,
            start_new_session=tty is not None,
            preexec_fn=None if tty is None else lambda: fcntl.ioctl(tty, termios.TIOCSCTTY, 0),
        )
        os.close(write)
        self._ready = os.fdopen(read)

    def urls(self) -> dict[str, str]:
        """The addresses of a server that is ready."""
        line = self._ready.readline()
        assert line, f"not ready, exit {self.process.wait(20)}\n{self.said()}"
        found: dict[str, str] = json.loads(line)
        return found

    def said(self) -> str:
        return os.pread(self._said.fileno(), 2**24, 0).decode(errors="replace")

    def wait_for(self, text: str) -> None:
        wait_for(lambda: text in self.said(), said=self.said)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(40)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._ready.close()
        self._said.close()


class Commands:
    """The commands by name. Each starts in the given surroundings, and returns the answer and the exit status."""

    def __init__(self, folder: Path, broker: str, captioner: str) -> None:
        self.folder, self._broker, self._captioner = folder, broker, captioner
        self._started: list[Started] = []
        self._number = 0
        (folder / "app.py").write_text(MODEL)
        (folder / "program.py").write_text(PROGRAM)
        for name in ("lib", "store", "tmp"):
            (folder / name).mkdir()
        (folder / "lib" / "pkgv.py").write_text("V = 7\n")
        self.paths = os.pathsep.join(filter(None, [str(folder / "lib"), os.environ.get("PYTHONPATH")]))
        manifest = {"modelName": "m", "modelVersion": "1.0", "handler": "app.py"}
        with zipfile.ZipFile(folder / "store" / "m.mar", "w") as mar:
            mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": manifest}))
            mar.writestr("app.py", MODEL)
        lines = [f"{api}_address=http://127.0.0.1:0" for api in ("inference", "management", "metrics")]
        lines += ["grpc_inference_port=0", "grpc_management_port=0", "default_workers_per_model=1"]
        (folder / "config.properties").write_text("\n".join([*lines, "model_store=store", "load_models=all", ""]))
        make_clip(folder / "clip.mp4", 3)

    def start(self, *command: str, shell: str = "", before: str = "", tty: int | None = None, **env: str) -> Started:
        env = {"TMPDIR": str(self.folder / "tmp"), **env}
        self._started.append(Started(self.folder, [sys.executable, *command], shell, before, env, tty))
        return self._started[-1]

    def penstock(self, *arguments: str, **surroundings: Any) -> Started:
        return self.start("-m", "penstock.cli.main", *arguments, **surroundings)

    def serve(self, *arguments: str, **surroundings: str) -> tuple[Any, int]:
        env = f"models.m.env={{PYTHONPATH='{self.folder / 'lib'}'}}"
        server = self.penstock("serve", "m=app.py:Model", *FREE_PORTS, "--set", env, *arguments, **surroundings)
        return fetch(server.urls()["inference"] + "/predictions/m"), server.stop()

    def start_torchserve(self, *flags: str, **surroundings: Any) -> Started:
        surroundings["PYTHONPATH"] = self.paths
        program = "from penstock.torchserve.cli.torchserve import main; main()"
        command = ("-c", program, "--ncs", "--disable-token-auth")
        return self.start(*command, *flags, **surroundings)

    def torchserve(self, **surroundings: str) -> tuple[Any, int]:
        server = self.start_torchserve("--foreground", **surroundings)
        return fetch(server.urls()["inference"] + "/predictions/m"), server.stop()

    def worker(self, **surroundings: str) -> tuple[Any, int]:
        self._number += 1
        prefix, env = f"p{self._number}", f"env={{PYTHONPATH='{self.folder / 'lib'}'}}"
        flags = ["--redis", self._broker, "--prefix", prefix, "--set", env]
        worker = self.penstock("worker", "app.py:served", *flags, **surroundings)
        with RedisStreamer(redis_broker=self._broker, prefix=prefix) as streamer:
            try:
                return streamer.predict([1])[0], worker.stop()
            except Exception as e:
                raise AssertionError(worker.said()) from e

    def caption(self, **surroundings: str) -> tuple[Any, int]:
        (self.folder / "captions.jsonl").unlink(missing_ok=True)
        job = self.penstock("caption", "clip.mp4", "--restart", "--server", self._captioner, **surroundings)
        status = job.process.wait(60)
        return len((self.folder / "captions.jsonl").read_text().splitlines()), status

    def streamer(self, **surroundings: str) -> tuple[Any, int]:
        (self.folder / "answer.json").unlink(missing_ok=True)
        program = self.start("program.py", PYTHONPATH=self.paths, **surroundings)
        status = program.process.wait(60)
        assert status == 0, program.said()
        return json.loads((self.folder / "answer.json").read_text()), status

    def said(self) -> str:
        """The output of the last command."""
        return self._started[-1].said()

    def close(self) -> None:
        for started in self._started:
            started.close()
        if (left := running_pid(str(self.folder / "tmp" / ".model_server.pid"))) is not None:
            os.kill(left, signal.SIGKILL)


def fetch(url: str) -> Any:
    trusting = ssl._create_unverified_context() if url.startswith("https:") else None
    with urllib.request.urlopen(urllib.request.Request(url, b"1"), timeout=60, context=trusting) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory, run_redis_all: Callable[..., Any]) -> Iterator[Commands]:
    with FakeCaptioner() as captioner:
        found = Commands(tmp_path_factory.mktemp("inherited"), run_redis_all().address, captioner.url)
        yield found
        found.close()


SURROUNDINGS = {
    "usual": {},
    "all_closed": {"shell": "<&- >&- 2>&-"},
    "full_disk": {"shell": "> /dev/full 2> /dev/full"},
    "no_reader": {"shell": "> >(:)"},
    "few_descriptors": {"before": "ulimit -n 64"},
}


@pytest.mark.parametrize("command", ["serve", "torchserve", "worker", "caption", "streamer"])
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_command_answers_and_ends_well(commands: Commands, command: str, surroundings: str) -> None:
    """Its model sees a program without arguments, with the packages of its own PYTHONPATH."""
    answer, status = getattr(commands, command)(**SURROUNDINGS[surroundings])
    assert answer == (3 if command == "caption" else ANSWER)
    assert status == 0, commands.said()


@pytest.mark.parametrize("command", ["serve", "torchserve"])
def test_a_server_with_too_few_descriptors_says_so(commands: Commands, command: str) -> None:
    if command == "serve":
        server = commands.penstock("serve", "app.py:served", *FREE_PORTS, before="ulimit -n 20")
    else:
        server = commands.start_torchserve("--foreground", before="ulimit -n 20")
    assert server.process.wait(20) != 0
    assert "the process may open 20 files, expected at least 32: raise the limit (ulimit -n)" in server.said()
    assert "Traceback" not in server.said()


@pytest.mark.parametrize("shell", ["<&-", ">&-", "2>&-", "> /dev/full", "2> /dev/full"])
def test_a_server_needs_no_standard_file(commands: Commands, shell: str) -> None:
    assert commands.serve(shell=shell) == (ANSWER, 0), commands.said()


@pytest.mark.parametrize("transport", ["thread", "inline"])
def test_a_model_in_the_process_of_the_server_sees_no_arguments(commands: Commands, transport: str) -> None:
    server = commands.penstock(
        "serve",
        "m=app.py:Model",
        *FREE_PORTS,
        f"--set=models.m.transport={transport}",
        PYTHONPATH=commands.paths,
    )
    assert (fetch(server.urls()["inference"] + "/predictions/m"), server.stop()) == (ANSWER, 0), server.said()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with key.pem and its certificate, the key encrypted, and the password."""
    for name in ("cert.pem", "key.pem"):
        shutil.copy(TLS / name, tmp_path)
    command = ["openssl", "pkey", "-in", "key.pem", "-aes128", "-passout", "file:password", "-out", "encrypted.pem"]
    (tmp_path / "password").write_text("secret\n")
    subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize("command", ["serve", "torchserve"])
def test_an_encrypted_key_never_asks_and_a_hangup_keeps_all_as_it_was(
    commands: Commands, keys: Path, command: str
) -> None:
    """The server has a terminal, on which OpenSSL would ask."""
    main, terminal = os.openpty()
    cert, key = keys / "cert.pem", keys / "key.pem"
    if command == "serve":
        flags = ["--tls-cert", str(cert), "--tls-key", str(key)]
        server = commands.penstock(
            "serve", "m=app.py:served", *FREE_PORTS, *flags, tty=terminal, PYTHONPATH=commands.paths
        )
    else:
        text = (commands.folder / "config.properties").read_text().replace("http:", "https:", 1)
        (keys / "tls.properties").write_text(f"{text}private_key_file={key}\ncertificate_file={cert}\n")
        server = commands.start_torchserve("--foreground", "--ts-config", str(keys / "tls.properties"), tty=terminal)
    url = server.urls()["inference"] + "/predictions/m"
    assert fetch(url) == ANSWER
    shutil.copy(keys / "encrypted.pem", key)
    server.process.send_signal(signal.SIGHUP)
    server.wait_for("reload_failed")
    assert f"the key {key} is encrypted" in server.said()
    assert fetch(url) == ANSWER
    assert server.stop() == 0
    os.set_blocking(main, False)
    with contextlib.suppress(OSError):
        assert b"pass phrase" not in os.read(main, 1000)
    for fd in (main, terminal):
        os.close(fd)


def test_an_encrypted_key_is_opened_with_its_password_also_after_a_hangup(commands: Commands, keys: Path) -> None:
    flags = ["--tls-cert", "cert.pem", "--tls-key", "encrypted.pem", "--tls-password-file", "password"]
    flags = [flag if flag.startswith("-") else str(keys / flag) for flag in flags]
    server = commands.penstock("serve", "m=app.py:served", *FREE_PORTS[:-1], *flags, PYTHONPATH=commands.paths)
    urls = server.urls()
    assert fetch(urls["inference"] + "/predictions/m") == ANSWER
    server.process.send_signal(signal.SIGHUP)
    server.wait_for("event=reloaded")
    assert fetch(urls["inference"] + "/predictions/m") == ANSWER
    assert server.stop() == 0


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
@pytest.mark.parametrize("command", ["serve", "torchserve"])
def test_every_port_at_all_addresses_is_open_to_both_families(commands: Commands, command: str) -> None:
    if command == "serve":
        hosts = [f"--set=server.{name}_host=::" for name in ("management", "metrics")]
        refused = commands.penstock("serve", "m=app.py:served", *FREE_PORTS, "--host=::", PYTHONPATH=commands.paths)
        assert refused.process.wait(20) == 2
        assert "found '::', which other machines can reach" in refused.said()
        flags = ["--host=::", "--insecure", *hosts]
        server = commands.penstock("serve", "m=app.py:served", *FREE_PORTS, *flags, PYTHONPATH=commands.paths)
    else:
        text = (commands.folder / "config.properties").read_text().replace("127.0.0.1", "[::]")
        text += "grpc_inference_address=::\ngrpc_management_address=::\n"
        (commands.folder / "all.properties").write_text(text)
        server = commands.start_torchserve("--foreground", "--ts-config", "all.properties")
    urls = [*server.urls().values(), *re.findall(r"gRPC API bind to: (\S+)", server.said())]
    assert len(urls) == (3 if command == "serve" else 5)
    for url in urls:
        assert "//[::]:" in url
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, int(url.rpartition(":")[2])), 10).close()
    server.close()  # at public addresses it would wait for a balancer


def test_a_server_in_the_background_leaves_its_pid_alone_without_standard_files(commands: Commands) -> None:
    """Its log would be the next file that it opens: the one with its PID."""
    file, log = commands.folder / "tmp" / ".model_server.pid", commands.folder / "background" / "ts_log.log"
    starting = commands.start_torchserve("--start", shell="<&- >&- 2>&-", LOG_LOCATION=str(log.parent))
    assert starting.process.wait(20) == 0
    wait_for(lambda: log.exists() and "Inference API bind to: " in log.read_text())
    assert re.fullmatch(r"\d+\n", file.read_text())
    elsewhere = commands.start_torchserve("--stop", TMPDIR=str(commands.folder))
    assert elsewhere.process.wait(20) == 0
    assert f"No server has {commands.folder}/.model_server.pid. Stop a server with the TMPDIR" in elsewhere.said()
    stopping = commands.start_torchserve("--stop", shell="> /dev/full")
    stopping.process.wait(60)
    assert not file.exists()


SPAWNING = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor


class Point:
    def __init__(self, x):
        self.x = x


def double(point):
    return Point(2 * point.x)


class Model:
    def predict(self, items):
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool, ProcessPoolExecutor(1, mp_context=context) as executor:
            return [[pool.map(double, [Point(1)])[0].x, executor.submit(double, Point(2)).result().x] for _ in items]
"""


@pytest.mark.parametrize("transport", ["process", "thread"])
def test_a_model_in_a_file_of_any_name_spawns_processes(commands: Commands, tmp_path: Path, transport: str) -> None:
    """Some names cannot be imported, or are Python's own."""
    targets = []
    for number, name in enumerate(("app.py", "my-model.py", "my.model.py", "json.py")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / name).write_text(SPAWNING)
        targets.append(f"m{number}={tmp_path / str(number) / name}:Model")
    sets = [f"--set=models.m{number}.transport={transport}" for number in range(len(targets))]
    url = commands.penstock("serve", *targets, *FREE_PORTS, *sets).urls()["inference"]
    for number in range(len(targets)):
        assert fetch(f"{url}/predictions/m{number}") == [2, 4]
