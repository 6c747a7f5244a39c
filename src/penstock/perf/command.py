"""What all commands that measure share: flags, statuses, signals and the event loop."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import click

from penstock.core.os_threads import new_event_loop
from penstock.errors import PenstockError
from penstock.values import quantity

T = TypeVar("T")

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130

_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(_: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Parses a duration: `90`, `90s`, `10m`, `1.5h`."""
    if value is None:
        return None
    found = quantity(value, _UNITS)
    if not found:
        raise click.BadParameter(f"expected a time over 0 such as 30, 30s, 10m or 1h, found '{value}'", param=parameter)
    return found


def warmup(_: click.Context, parameter: click.Parameter, value: str) -> float | None:
    """Parses a warm-up: None for auto, else seconds."""
    if value == "auto":
        return None
    found = quantity(value, {"": 1.0, "s": 1.0})
    if found is None or found >= 3600:
        raise click.BadParameter(f"expected auto or seconds from 0, found '{value}'", param=parameter)
    return found


def exit_code(work: Callable[[], int]) -> int:
    """The result of `work`, or the status of its error, printed in one line. SIGTERM and SIGHUP act like Ctrl-C."""
    as_interrupt = {number: lambda *_: signal.raise_signal(signal.SIGINT) for number in (signal.SIGTERM, signal.SIGHUP)}
    # A shell starts background jobs with SIGINT ignored.
    handlers = {signal.SIGINT: signal.default_int_handler, **as_interrupt}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return work()
    except PenstockError as error:
        click.echo(f"penstock: {error.message}", err=True)
        return error.exit_status
    except KeyboardInterrupt:
        click.echo("penstock: interrupted", err=True)
        return INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """The result of the coroutine, on uvloop if installed. Ctrl-C cancels it and is raised after it ended."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
