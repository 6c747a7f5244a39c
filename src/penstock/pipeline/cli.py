"""`penstock pipeline check|convert|run|show|ops`: checks, draws or rewrites a pipeline's file, or runs files by it."""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import sys
import time
import urllib.request
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from penstock.config.load import SERVER_SECTIONS, read_toml
from penstock.config.schema import Config
from penstock.config.targets import errors_end_the_command
from penstock.core.arrays import plain_array
from penstock.errors import ConfigError, PenstockError, describe
from penstock.plugins import is_pipeline_file

if TYPE_CHECKING:
    from penstock.pipeline.graph import Graph
    from penstock.pipeline.traversal import ItemOutcome

_MOST_PAGE = 64 * 2**20  # bytes of a metrics page
_WHOLE = 16  # most numbers of an array that are printed one by one

_compat = click.option(
    "--compat", type=click.Choice(["torchpipe"]), help="Warn about unknown keys, as TorchPipe's files need."
)
_file = click.argument("file", type=click.Path())


class _Commands(click.Group):
    """Ends a command that raises a PenstockError with its message and status."""

    def invoke(self, ctx: click.Context) -> Any:
        with errors_end_the_command():
            return super().invoke(ctx)


@click.group(cls=_Commands)
def pipeline() -> None:
    """Inspect, convert and run pipelines: TOML files of nodes."""


@pipeline.command()
@_file
@_compat
def check(file: str, compat: str | None) -> None:
    """Check FILE, and print its nodes and the fields on each edge.

    Exits with 2 and a message if the file cannot be served. A missing model is only reported, because the file may be
    for another machine.
    """
    from penstock.config.load import load_config
    from penstock.pipeline.check import check as check_graph
    from penstock.pipeline.check import fields_of
    from penstock.pipeline.describe import graph_text
    from penstock.pipeline.load import source_of

    load_config(None, env={}, sets=(), base={}, pipelines=[file])  # the server's tables
    graph, source = _load(file, compat), source_of(file)
    fields_of(graph, source)
    click.echo(graph_text(graph), nl=False)
    check_graph(graph, source)


@pipeline.command()
@_file
@click.option("-o", "--output", type=click.Path(), help="Output file; default: standard output.")
@_compat
def convert(file: str, output: str | None, compat: str | None) -> None:
    """Rewrite FILE, for instance one of TorchPipe's, with native keys."""
    from penstock.pipeline.describe import to_toml
    from penstock.pipeline.load import read_tables
    from penstock.pipeline.notation import SERVER_TABLES

    graph = _load(file, compat)
    kept = {name: table for name, table in read_tables(file).items() if name in SERVER_TABLES and name != "pipeline"}
    folder = os.path.dirname(os.path.abspath(output if output is not None else file))
    _write(to_toml(graph, folder=folder, tables=kept), output)


def _write(text: str, output: str | None) -> None:
    """Writes to a file, or to standard output."""
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{output}: cannot be written: {e.strerror}") from None


@pipeline.command()
@_file
@click.argument("inputs", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--node", help="The node where the items begin. Default: the pipeline's entry.")
@click.option("--trace", is_flag=True, help="Also print each item's path, as a tree on standard error.")
@_compat
def run(file: str, inputs: tuple[str, ...], node: str | None, trace: bool, compat: str | None) -> None:
    """Run files, such as images, through FILE in this process.

    Prints one JSON object per file, and exits with 1 if a file failed. Large arrays appear as a summary.
    """
    from penstock.pipeline.check import check as check_graph
    from penstock.pipeline.describe import trace_text
    from penstock.pipeline.local import LocalPipeline

    graph = _load(file, compat)
    check_graph(graph)
    with LocalPipeline(replace(graph, trace=trace)) as running:
        outcomes = running.infer_many([({"data": Path(name).read_bytes()}, node) for name in inputs])
    for name, outcome in zip(inputs, outcomes, strict=True):
        click.echo(json.dumps({"file": name} | _response(graph, outcome, trace=trace)))
        if trace:
            click.echo(f"{name}\n{trace_text(graph, outcome.hops)}", err=True)
    sys.exit(any(outcome.error is not None for outcome in outcomes))


@pipeline.command()
@_file
@click.option("-o", "--output", type=click.Path(), help="Output file: .svg, or anything else for Mermaid.")
@click.option("--server", help="Metrics address of a running server, such as http://127.0.0.1:8082: adds its load.")
@click.option("--model", default="", help="With --server: the model's name there. Default: all models.")
@click.option("--seconds", default=1.0, type=click.FloatRange(0.1, 600), help="With --server: length of the sample.")
@_compat
def show(file: str, output: str | None, server: str | None, model: str, seconds: float, compat: str | None) -> None:
    """Draw the graph of FILE as SVG or Mermaid; without an output file, print Mermaid.

    With --server each node has the items in its queue, the mean size of its batches, and its busy instances.
    """
    from penstock.pipeline.describe import mermaid, read_loads, svg

    graph = _load(file, compat)
    loads = {}
    if server is not None:
        first, began_s = _metrics_page(server), time.monotonic()
        time.sleep(seconds)
        second = _metrics_page(server)
        if not (loads := read_loads(first, second, time.monotonic() - began_s, model)):
            raise ConfigError(f"{server}: has no metrics of a pipeline{f' {model}' if model else ''}")
    draw = svg if output is not None and output.lower().endswith(".svg") else mermaid
    _write(draw(graph, loads), output)


def _metrics_page(server: str) -> str:
    url = server.rstrip("/").removesuffix("/metrics") + "/metrics"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--server: found {server}, expected an address such as http://127.0.0.1:8082")
    try:
        with urllib.request.urlopen(url, timeout=10) as page:
            return page.read(_MOST_PAGE).decode()  # type: ignore[no-any-return]
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise PenstockError(f"{url}: {describe(e)}") from None


@pipeline.command()
@click.argument("names", nargs=-1)
def ops(names: tuple[str, ...]) -> None:
    """List the ops, or print the parameters of the named ones."""
    from penstock.pipeline.describe import op_text, ops_text

    click.echo("\n".join(map(op_text, names)) if names else ops_text())


def _load(file: str, compat: str | None) -> Graph:
    from penstock.pipeline.load import load_graph

    if os.getcwd() not in sys.path:  # ops may be modules of the working directory, as in a worker
        sys.path.insert(0, os.getcwd())
    return load_graph(file, compat=compat is not None)


def _response(graph: Graph, outcome: ItemOutcome, *, trace: bool) -> dict[str, Any]:
    if outcome.error is not None:
        response: dict[str, Any] = {"error": {"code": outcome.error.code, "message": outcome.error.message}}
    else:
        response = {name: _plain(outcome.fields[name]) for name in graph.gives if name in outcome.fields}
    response["node"] = outcome.node
    if trace:
        response["trace"] = [
            {
                "node": hop.node,
                **({"element": list(hop.element)} if hop.element else {}),
                "batch": hop.batch_id,
                "size": hop.size,
                "wait_ms": round(hop.wait_s * 1000, 3),
                "run_ms": round(hop.run_s * 1000, 3),
            }
            for hop in outcome.hops
        ]
    return response


def _plain(value: Any) -> Any:
    """A value for JSON. A large array becomes its shape, dtype, and maximum with its index."""
    value = plain_array(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        if value.size <= _WHOLE:
            return value.tolist()
        return {
            "shape": list(value.shape),
            "dtype": str(value.dtype),
            "argmax": int(value.argmax()),
            "max": float(value.max()),
        }
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": len(value)}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


# ---- checks before a server starts

log = logging.getLogger("penstock.cli")

PATIENCE_S = 60.0  # limit of a check, because importing the module of an op may hang


def pipelines_of(config: Config) -> dict[str, bool]:
    """The pipeline files of a configuration, and whether each is in TorchPipe's dialect."""
    targets = (model for model in config.models.values() if is_pipeline_file(model.target))
    return {model.target: bool(model.options.get("compat", False)) for model in targets}


def warn_of_sections(config: Config, merged: frozenset[str]) -> None:
    """Warns about server tables in pipeline files other than `merged`, because they have no effect."""
    for file in {os.path.realpath(file) for file in pipelines_of(config)} - merged:
        for section in SERVER_SECTIONS:
            if section in read_toml(file):
                log.warning(
                    "file=%s table=%s ignored=true hint=set it in the configuration that names the file", file, section
                )


class PipelineCheck:
    """A check of pipelines in a child process, so that this process loads none of their libraries.

    Create it before this process has threads.
    """

    def __init__(self, pipelines: dict[str, bool]) -> None:
        self._pid = 0
        if not pipelines:
            return
        self._read, write = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(write)
            return
        try:
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
            os.write(write, _first_problem(pipelines).encode(errors="replace"))
        finally:
            os._exit(0)

    def result(self) -> None:
        """Waits for the check. Raises ConfigError for the first bad pipeline.

        A check that dies or times out has no result, and the worker reports the cause.
        """
        if not self._pid:
            return
        with os.fdopen(self._read, "rb") as pipe:
            problem = pipe.read().decode()
        os.waitpid(self._pid, 0)
        self._pid = 0
        if problem:
            raise ConfigError(problem)


def _first_problem(pipelines: dict[str, bool]) -> str:
    """The message of the first bad pipeline, or ""."""
    logging.disable()  # the workers log the same warnings
    warnings.simplefilter("ignore")
    try:
        check_pipelines(pipelines, models=True)
    except PenstockError as e:
        return e.message
    except BaseException as e:
        return describe(e)
    return ""


def check_pipelines(pipelines: dict[str, bool], *, models: bool = False) -> None:
    """Raises ConfigError for a file that a worker would reject; with `models`, also for a missing model."""
    if not pipelines:
        return
    from penstock.pipeline.check import check
    from penstock.pipeline.load import load_graph, source_of
    from penstock.pipeline.lower import files_of
    from penstock.pipeline.ops.catalog import is_model

    sys.path[:0] = [os.getcwd()]  # as in the workers
    for file, compat in pipelines.items():
        graph = load_graph(file, compat=compat)
        check(graph, source_of(file))
        for node in graph.nodes.values() if models else ():
            for step in node.steps:
                missing = [name for name in files_of(step.params) if not os.path.isfile(name)]
                if is_model(step.op) and missing:
                    raise ConfigError(f"{file}: [{node.name}] model: there is no file {missing[0]}")
