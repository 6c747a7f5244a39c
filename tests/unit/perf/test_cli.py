import asyncio
import signal

import click
import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.load_run import run_async
from penstock.perf.cli import exit_code, seconds


def read(text: str | None) -> float | None:
    return seconds(click.Context(click.Command("x")), click.Option(["--duration"]), text)


@pytest.mark.parametrize(
    ("text", "found"),
    [("30", 30), ("1.5", 1.5), ("30s", 30), ("10m", 600), ("1.5h", 5400), ("1e3", 1000), (None, None)],
)
def test_times_are_read_with_their_unit(text: str | None, found: float | None) -> None:
    assert read(text) == found


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "10 minutes", "1:30", "s", "1e3e", "٣"])
def test_an_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected a time over 0"):
        read(text)


def raising(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("no such knob"), 2, "penstock: no such knob\n"),
        (PenstockError("the disk is full"), 1, "penstock: the disk is full\n"),
        (KeyboardInterrupt(), 130, "penstock: interrupted\n"),
    ],
)
def test_errors_become_one_line_and_a_status(
    error: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(lambda: raising(error)) == code
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_cancel_the_run_and_handlers_are_restored(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    seen: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    def both() -> int:
        run_async(work())
        return 0

    assert exit_code(both) == 130
    assert seen == ["cancelled"]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
