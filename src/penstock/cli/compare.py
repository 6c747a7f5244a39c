"""`penstock compare`: what became of a model's speed between two runs of `penstock bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.measuring import exit_code

if TYPE_CHECKING:
    from penstock.perf.bench.compare import Comparison

FOLDER = click.Path(path_type=Path)


def share(_: click.Context, parameter: click.Parameter, value: str) -> float:
    """What a flag of a share says: `5%`, `0.05`."""
    try:
        found = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1:
        raise click.BadParameter(f"expected a share such as 5% or 0.05, found '{value}'", param=parameter)
    return found


tolerance = click.option(
    "--tolerance", callback=share, default="5%", show_default=True, help="A smaller change does not matter."
)


def compared(before: Path, after: Path, tolerance: float) -> Comparison:
    """How the folder `after` differs from `before`. Raises ConfigError for what is no folder of results."""
    from penstock.perf.bench.compare import compare
    from penstock.perf.bench.results import read

    return compare(read(before), read(after), tolerance=tolerance)


def lines(comparison: Comparison) -> Sequence[str]:
    """The comparison as it is read on a terminal."""
    from penstock.perf.bench.compare import HEADER
    from penstock.perf.bench.table import plain

    told = [f"ANOTHER MACHINE: {text}" for text in comparison.other_machine]
    told += comparison.notes
    told += [f"{load}: only in the first run" for load in comparison.missing]
    table = [HEADER, *(change.cells() for change in comparison.changes)]
    return [*told, *(plain(table) if comparison.changes else ["no load is in both runs"])]


@click.command()
@click.argument("before", type=FOLDER)
@click.argument("after", type=FOLDER)
@tolerance
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
def compare(before: Path, after: Path, tolerance: float, as_json: bool) -> None:
    """Tell what is better or worse in AFTER than in BEFORE, and how sure that is.

    Both are folders of `penstock bench --output`, with 3 repeats or more; 10 see what 3 cannot.

    Exit status: 0 compared, 2 wrong usage.
    """
    sys.exit(exit_code(lambda: _compare(before, after, tolerance, as_json)))


def _compare(before: Path, after: Path, tolerance: float, as_json: bool) -> int:
    import msgspec

    comparison = compared(before, after, tolerance)
    if as_json:
        told = msgspec.to_builtins(comparison) | {"verdict": comparison.verdict}
        click.echo(msgspec.json.format(msgspec.json.encode(told)))
    else:
        click.echo("\n".join([*lines(comparison), f"{after} is {_words(comparison)} {before}"]))
    return 0


def _words(comparison: Comparison) -> str:
    return {"worse": "worse than", "better": "better than", "same": "the same as"}.get(
        comparison.verdict, "not to be compared with"
    )
