"""Pipelines among what is served: which files tell one, and whether they are right, asked before a worker starts."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from typing import TYPE_CHECKING

from penstock.config.load import SERVER_SECTIONS, read_toml
from penstock.config.schema import Config
from penstock.errors import ConfigError, PenstockError, describe
from penstock.plugins import is_pipeline_file

if TYPE_CHECKING:
    from penstock.pipeline.graph import Graph

log = logging.getLogger("penstock.cli")

PATIENCE_S = 60.0  # of a check: a module that is imported for an op may never be done


def pipelines_of(config: Config) -> dict[str, bool]:
    """The files of the pipelines that are to be served, and whether each is in TorchPipe's dialect."""
    targets = (model for model in config.models.values() if is_pipeline_file(model.target))
    return {model.target: bool(model.options.get("compat", False)) for model in targets}


def warn_of_sections(config: Config, merged: frozenset[str]) -> None:
    """Tells of tables for a server in files of pipelines that count for nothing: those of others than `merged`."""
    for file in {os.path.realpath(file) for file in pipelines_of(config)} - merged:
        for section in SERVER_SECTIONS:
            if section in read_toml(file):
                log.warning(
                    "file=%s table=%s ignored=true hint=the configuration that names the file has it", file, section
                )


class Checking:
    """A check of pipelines that goes on in a process of its own, so that this one loads none of their libraries.

    To be made before this process has threads.
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
            os.write(write, _wrong(pipelines).encode(errors="replace"))
        finally:
            os._exit(0)

    def result(self) -> None:
        """Waits for the end of it. Raises ConfigError for the first pipeline that is wrong.

        A check that dies, or takes too long, has no result: a worker will tell what it dies of.
        """
        if not self._pid:
            return
        with os.fdopen(self._read, "rb") as pipe:
            told = pipe.read().decode()
        os.waitpid(self._pid, 0)
        self._pid = 0
        if told:
            raise ConfigError(told)


def _wrong(pipelines: dict[str, bool]) -> str:
    """What is wrong with the first pipeline that is not right; empty if all are."""
    logging.disable()  # the workers warn of the same
    warnings.simplefilter("ignore")
    try:
        check_pipelines(pipelines, models=True)
    except PenstockError as e:
        return e.message
    except BaseException as e:
        return describe(e)
    return ""


def check_pipelines(pipelines: dict[str, bool], *, models: bool = False) -> None:
    """Raises ConfigError for what a worker would refuse in one of the files before it loads any model.

    `models`: also for a model that is not there.
    """
    if not pipelines:
        return
    from penstock.pipeline.check import check
    from penstock.pipeline.load import load_graph

    sys.path[:0] = [os.getcwd()]  # as in the workers
    for file, compat in pipelines.items():
        graph = load_graph(file, compat=compat)
        check(graph)
        if models:
            _check_models(graph, file)


def _check_models(graph: Graph, file: str) -> None:
    from penstock.pipeline.ops.catalog import is_model

    for node in graph.nodes.values():
        for step in node.steps:
            model = step.params.get("model", "")
            if is_model(step.op) and not os.path.isfile(model):
                raise ConfigError(f"{file}: [{node.name}] model: there is no file {model}")
