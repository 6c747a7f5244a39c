"""Where a listener listens: an address and port, or a path; and why it cannot."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from penstock.errors import ConfigError


def free_path(path: str, key: str) -> None:
    """Removes what a listener that is gone left at `path`. Raises ConfigError if something else is there."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as exc:
        raise path_error(path, exc, key) from None
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen on unix:{path}: a file that is no socket is there; choose another with {key}")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError as exc:
            raise path_error(path, exc, key) from None
    raise ConfigError(f"cannot listen on unix:{path}: another process listens there; choose another with {key}")


def path_error(path: str, exc: Exception, key: str) -> ConfigError:
    """Why a socket could not be made at `path`, and the key to change."""
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return ConfigError(f"cannot listen on unix:{path}: {reason.lower()}; choose another path with {key}")


def bind_error(host: str, port: int, exc: Exception, key: str) -> ConfigError:
    """Why `host:port` could not be bound, and the key to change; `key` is that of the port."""
    if isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE:
        return ConfigError(
            f"cannot listen on {host}:{port}: the port is in use; choose another with {key} (0 takes a free one)"
        )
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    if isinstance(exc, PermissionError):
        return ConfigError(f"cannot listen on {host}:{port}: {reason.lower()}; choose a port above 1023 with {key}")
    return ConfigError(
        f"cannot listen on {host}:{port}: {reason.lower()}; choose another address with {key.replace('port', 'host')}"
    )
