"""Checks of the pipelines that `penstock serve` and `penstock config` find, before any worker starts."""

import logging
import os
import signal
import sys
import warnings

from penstock.config.load import SERVER_SECTIONS, read_toml
from penstock.config.schema import Config
from penstock.errors import ConfigError, PenstockError, describe
from penstock.plugins import is_pipeline_file

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
