"""`penstock gate`: fails a build whose model got slower than its baseline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click

from penstock.cli.compare import FOLDER, compared, lines, tolerance
from penstock.errors import ConfigError, PenstockError

_WORDS: Final = {0: "PASS", 1: "REGRESSION", 2: "INVALID"}


class _Gate(click.Command):
    """Wrong usage is its own exit status here: 2 says that the runs tell nothing."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        from penstock.perf.bench.gate import USAGE

        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            error.exit_code = USAGE  # type: ignore[misc]
            raise


@click.command(cls=_Gate)
@click.argument("run", type=FOLDER)
@click.option("--baseline", type=FOLDER, required=True, help="The folder of results that it must keep up with.")
@tolerance
@click.option("--junit", type=click.Path(path_type=Path), metavar="FILE", help="Write the answer as JUnit XML.")
@click.option("--any-machine", is_flag=True, help="Also hold runs of different machines against each other.")
def gate(run: Path, baseline: Path, tolerance: float, junit: Path | None, any_machine: bool) -> None:
    """Tell whether RUN is as good as its baseline.

    Both are folders of `penstock bench --output`, with 3 repeats or more; 10 are better.

    Exit status: 0 pass, 1 regression, 2 invalid (the runs cannot tell), 3 wrong usage.
    """
    from penstock.perf.bench.gate import USAGE

    try:
        sys.exit(_gate(run, baseline, tolerance, junit, any_machine))
    except PenstockError as error:
        click.echo(f"penstock: {error.message}", err=True)
        sys.exit(USAGE)


def _gate(run: Path, baseline: Path, tolerance: float, junit: Path | None, any_machine: bool) -> int:
    from penstock.perf.bench import gate

    comparison = compared(baseline, run, tolerance)
    decision = gate.decide(comparison, any_machine=any_machine)
    click.echo("\n".join([*lines(comparison), *decision.why, _WORDS[decision.code]]))
    if junit is not None:
        try:
            junit.write_bytes(gate.junit(comparison, decision))
        except OSError as e:
            raise ConfigError(f"--junit {junit} cannot be written: {e.strerror}") from None
    return decision.code
