"""Becomes a container: `unshare --mount --net python pod_init.py SPEC`, where SPEC is a JSON file.

The container's root has the machine's system folders, read-only. The folders of users are empty except for `keep` (the
Python that is tested) and what `mounts` puts there. A child executes `argv` with exactly `env`, `uid` and `workdir`, as
process 1, with a loopback interface of its own.

This process stays outside. It writes the child's number to the file `pid` beside SPEC, makes connections to the ports
of the container for those who ask on the socket `agent` beside SPEC, and ends with the child's status.
"""

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys

SHARED = ("tmp",)
EMPTY = (*SHARED, "etc", "home", "mnt", "opt", "proc", "root", "run", "srv")
MACHINE = ".etc"
READ_ONLY, REMOUNT, BIND, RECURSIVE = 1, 32, 4096, 16384
NEW_PIDS = 0x20000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
SET_PARENT_DEATH_SIGNAL, SET_NAME, NO_NEW_PRIVILEGES = 1, 15, 38
INIT = ["tini", "--"]
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    check(result, f"mount {source} {target}")


def make_root(spec: dict, root: str) -> str:
    mount("tmpfs", root, "tmpfs", 0, "mode=755")
    for name in os.listdir("/"):
        source, target = f"/{name}", f"{root}/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
        elif os.path.isdir(source):
            os.mkdir(target)
            os.chmod(target, 0o1777 if name in SHARED else 0o755)
            if name not in EMPTY:
                bind(source, target, read_only=name != "dev")
    os.mkdir(f"{root}/{MACHINE}")
    bind("/etc", f"{root}/{MACHINE}")
    for name in os.listdir("/etc"):  # files can be added to /etc
        os.symlink(f"/{MACHINE}/{name}", f"{root}/etc/{name}")
    for source, target in spec["copies"]:
        os.makedirs(os.path.dirname(root + target), exist_ok=True)
        shutil.copy(source, root + target)
    # `keep` comes last, for the Python may be in /tmp, which a mount can hide
    for source, target in [*spec["mounts"], *((path, path) for path in spec["keep"])]:
        os.makedirs(root + target, exist_ok=True)
        bind(source, root + target, read_only=False)
    mount("proc", root + "/proc", "proc")
    return root


def bind(source: str, target: str, read_only: bool = True) -> None:
    mount(source, target, "", BIND | RECURSIVE)
    if read_only and os.stat(source).st_uid == os.getuid():  # otherwise its files are read-only already
        mount("", target, "", BIND | REMOUNT | READ_ONLY)


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(s, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


# ---- the container


def become_container(spec: dict, scratch: str) -> None:
    uid = spec["uid"]
    os.chroot(make_root(spec, scratch))
    os.makedirs(spec["workdir"], exist_ok=True)
    os.chown(spec["workdir"], uid, uid)
    os.chdir(spec["workdir"])
    if spec["read_only"]:
        mount("", "/", "", BIND | REMOUNT | READ_ONLY)
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)  # also drops all capabilities
    libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    argv, env = spec["argv"], spec["env"]
    if argv[: len(INIT)] == INIT and not shutil.which(INIT[0], path=env["PATH"]):
        stand_in(argv[len(INIT) :], env)
    execute(argv, env)


def execute(argv: list, env: dict) -> None:
    os.environ["PATH"] = env["PATH"]  # where `execvpe` searches
    os.execvpe(argv[0], argv, env)


def stand_in(argv: list, env: dict) -> None:
    """Does what tini does, on a machine without it: passes signals on, reaps, and ends with its child's status."""
    libc.prctl(SET_NAME, INIT[0].encode(), 0, 0, 0)
    child = os.fork()
    if not child:
        execute(argv, env)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(child, number))
    while (ended := os.wait())[0] != child:
        pass
    os._exit(status(ended[1]))


# ---- outside


def status(waited: int) -> int:
    code = os.waitstatus_to_exitcode(waited)
    return code if code >= 0 else 128 - code


def answer(asked: socket.socket) -> None:
    """Sends a connection to the port that was asked for, or the number of the error."""
    with asked, socket.socket() as s:
        error = s.connect_ex(("127.0.0.1", int(asked.recv(16))))
        if error:
            asked.send(str(error).encode())
        else:
            socket.send_fds(asked, [b"0"], [s.fileno()])


def serve(agent: socket.socket, child: int) -> None:
    """Until the child ends."""
    ended = os.pidfd_open(child)
    while ended not in (ready := select.select([agent, ended], [], [])[0]):
        if ready:
            answer(agent.accept()[0])
    os._exit(status(os.waitpid(child, 0)[1]))


def main() -> None:
    folder = os.path.dirname(sys.argv[1])
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    raise_loopback()
    agent = socket.socket(socket.AF_UNIX)
    agent.bind(os.path.join(folder, "agent"))
    agent.listen(128)
    check(libc.unshare(NEW_PIDS), "unshare")
    child = os.fork()
    if not child:
        agent.close()
        become_container(spec, os.path.join(folder, "scratch"))
    with open(os.path.join(folder, "pid.new"), "w") as file:
        file.write(str(child))
    os.rename(os.path.join(folder, "pid.new"), os.path.join(folder, "pid"))
    serve(agent, child)


if __name__ == "__main__":
    main()
