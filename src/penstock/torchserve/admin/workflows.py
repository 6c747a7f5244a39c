"""The registered workflows. Each node of a workflow is a registered model, named WORKFLOW__NODE."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from penstock.core.contracts import Submitter, Ticket
from penstock.core.engine.calls import release
from penstock.errors import ArchiveError, PenstockError, describe
from penstock.torchserve.admin.archives import mar_name, open_archive, read_yaml, run_in_thread
from penstock.torchserve.admin.files import SnapshotKind
from penstock.torchserve.admin.model_spec import VersionRequest
from penstock.torchserve.admin.models import ModelVersion
from penstock.torchserve.archive.manifest import Manifest, check_model_name
from penstock.torchserve.archive.store import ModelStore, UnpackedArchive
from penstock.torchserve.config import Properties
from penstock.torchserve.protocol.api import MAX_SHOWN, ApiError, ChangeResult, RegisterRequest, WorkflowRequest
from penstock.types import Item, Sink

if TYPE_CHECKING:  # a server without workflows loads no pipeline
    from penstock.torchserve.workflow import RunningWorkflow, WorkflowNode, WorkflowSpec

log = logging.getLogger("penstock.torchserve")


T = TypeVar("T")


class Versions(Protocol):
    """The part of Administrator that workflows need; see there."""

    async def change(self, change: Coroutine[Any, Any, T]) -> T: ...

    async def claim(self, request: VersionRequest, *, at_startup: bool = False) -> ModelVersion: ...

    async def start(self, version: ModelVersion, *, keep: bool) -> None: ...

    async def remove(self, version: ModelVersion) -> None: ...

    def snapshot(self, kind: SnapshotKind) -> None: ...

    def check_complete(self) -> None: ...


class _Workflow(Struct, eq=False):
    """`running` is None until every node is up."""

    url: str
    spec: WorkflowSpec
    files: UnpackedArchive
    versions: dict[str, ModelVersion] = field(default_factory=dict)  # by node
    running: RunningWorkflow | None = None


class Workflows:
    """Registers workflows and sends requests to them. Changes run to completion and raise ApiError."""

    def __init__(self, administrator: Versions, models: Submitter, store: ModelStore, properties: Properties) -> None:
        self._administrator = administrator
        self._models = models
        self._store = store
        self._properties = properties
        self._found: dict[str, _Workflow] = {}

    # ---- requests

    def submit(self, name: str, item: Item, sink: Sink) -> Ticket:
        """Begins a request. Raises ApiError."""
        try:
            found = self._find(name)
        except ApiError:
            release(item)
            raise
        assert found.running is not None
        return found.running.submit(item, sink)

    # ---- queries

    def ready(self, name: str) -> bool:
        """Whether every node has a worker. Raises ApiError."""
        return all(version.ready for version in self._find(name).versions.values())

    def listed(self) -> list[tuple[str, str]]:
        """(name, url) of each workflow, by name."""
        return sorted((name, each.url) for name, each in self._found.items() if each.running is not None)

    def describe(self, name: str) -> dict[str, Any]:
        """The object of `GET /workflows/{workflow}`."""
        found = self._find(name)
        settings = found.spec.settings
        return {
            "workflowName": name,
            "workflowUrl": found.url,
            "minWorkers": settings.min_workers,
            "maxWorkers": settings.max_workers,
            "batchSize": settings.batch_size,
            "maxBatchDelay": settings.max_batch_delay,
            "workflowDag": found.spec.dag_text,
        }

    def states(self) -> dict[str, dict[str, Any]]:
        """The state of each workflow in a snapshot, from which it can be started again."""
        return {
            name: {
                "url": _stored(found.url),
                "workers": {node: [v.min_workers, v.max_workers] for node, v in found.versions.items()},
            }
            for name, found in self._found.items()
            if found.running is not None
        }

    def _find(self, name: str) -> _Workflow:
        found = self._found.get(name)
        if found is None or found.running is None:
            self._administrator.check_complete()
            raise ApiError("WorkflowNotFoundException", f"Workflow not found: {name[:MAX_SHOWN]}")
        return found

    # ---- changes

    async def register(self, request: WorkflowRequest, workers: Mapping[str, Any] | None = None) -> ChangeResult:
        """Registers the models of all nodes and starts their workers; a failure of one removes all.

        `workers` are those of a snapshot: {node: [minimum, maximum]}.
        """
        return await self._administrator.change(self._register(request, workers))

    async def unregister(self, name: str) -> ChangeResult:
        """Refuses further requests, waits for those in flight, and removes the nodes."""
        found = self._find(name)
        del self._found[name]
        await self._administrator.change(self._remove(found))
        self._administrator.snapshot("snapshot")
        log.info("unregistered workflow=%s", name)
        return ChangeResult(f'Workflow "{name}" unregistered')

    async def restore(self, states: Mapping[str, Any]) -> int:
        """Registers the workflows of a snapshot, and returns how many are missing, which the log explains."""
        return sum(await asyncio.gather(*(self._restore(name, state) for name, state in states.items())))

    async def _restore(self, name: str, state: Any) -> bool:
        """Whether the workflow is missing."""
        url, workers = (state.get("url"), state.get("workers")) if isinstance(state, dict) else (None, None)
        request = WorkflowRequest(url=url if isinstance(url, str) else None, workflow_name=name)
        try:
            await self.register(request, workers if isinstance(workers, dict) else {})
        except Exception as e:  # an unexpected one does not keep others from being served
            log.error(
                "Failed to load workflow: %s: %s", name, e.message if isinstance(e, PenstockError) else describe(e)
            )
            return True
        return False

    async def _register(self, request: WorkflowRequest, workers: Mapping[str, Any] | None) -> ChangeResult:
        url, name, files, spec = await run_in_thread(partial(self._open, request))
        found = _Workflow(url, spec, files)
        if name in self._found:
            await self._release(found)
            raise ApiError("ConflictStatusException", f"Workflow {name} is already registered.")
        self._found[name] = found  # claims the name
        try:
            await self._start(found, request, workers)
        except BaseException:
            del self._found[name]
            await self._remove(found)
            raise
        self._administrator.snapshot("snapshot")
        log.info("registered workflow=%s nodes=%d", name, len(found.versions))
        return ChangeResult(f"Workflow {name} has been registered and scaled successfully.")

    def _open(self, request: WorkflowRequest) -> tuple[str, str, UnpackedArchive, WorkflowSpec]:
        from penstock.torchserve.workflow import invalid, make_workflow

        try:
            files = open_archive(self._store, request.url, request.workflow_name, request.s3_sse_kms)
        except ApiError as e:
            raise _of_workflow(e, request.url) from e
        assert request.url is not None
        try:
            manifest = files.archive.manifest
            if not manifest.is_workflow:
                raise ApiError("InvalidWorkflowException", "Missing Workflow entry in manifest file.")
            if not manifest.config_file:
                raise invalid("the manifest names no specFile")
            try:
                name = check_model_name(request.workflow_name or manifest.model_name)
                spec = make_workflow(name, read_yaml(files.archive.folder, manifest.config_file))
            except ArchiveError as e:
                raise ApiError("InvalidWorkflowException", e.message) from None
            if not manifest.handler and (functions := [n.name for n in spec.nodes.values() if n.url is None]):
                raise invalid(f"{functions[0][:MAX_SHOWN]} is no model, and the archive has no handler file")
            return request.url, name, files, spec
        except BaseException as e:
            files.close()
            self._store.forget(request.url)
            if isinstance(e, ApiError):
                raise _of_workflow(e, request.url) from e
            raise

    async def _start(self, found: _Workflow, request: WorkflowRequest, workers: Mapping[str, Any] | None) -> None:
        from penstock.torchserve.workflow import RunningWorkflow

        nodes = found.spec.nodes
        requests = {name: self._request(found, node, request, workers is not None) for name, node in nodes.items()}
        ended = await asyncio.gather(
            *(self._start_node(found, nodes[name], requests[name], (workers or {}).get(name)) for name in nodes),
            return_exceptions=True,
        )
        failures = [e for e in ended if e is not None]
        if failures:
            texts = ", ".join(e.message if isinstance(e, PenstockError) else describe(e) for e in failures)
            message = f"Workflow {found.spec.name} has failed to register. Failures: [{texts}]"
            detail = "\n".join(e.detail for e in failures if isinstance(e, PenstockError))
            raise ApiError("WorkflowException", message, detail=detail)
        versions = {name: version.version for name, version in found.versions.items()}
        found.running = RunningWorkflow(found.spec, versions, self._models)

    def _request(
        self, found: _Workflow, node: WorkflowNode, request: WorkflowRequest, restored: bool
    ) -> VersionRequest:
        archive, s = found.files.archive, node.settings
        settings = {
            "minWorkers": s.workers,
            "maxWorkers": s.workers,
            "batchSize": s.batch_size,
            "maxBatchDelay": s.max_batch_delay,
            "responseTimeout": request.response_timeout,
            "startupTimeout": request.startup_timeout,
        }
        url = _stored(node.url) if restored and node.url is not None else node.url
        registration = RegisterRequest(url=url, model_name=node.model)
        if node.url is None:
            file = archive.manifest.handler.partition(":")[0]
            manifest = Manifest(model_name=node.model, handler=f"{file}:{node.name}")
            archive = replace(archive, manifest=manifest, has_manifest=False)
            return VersionRequest(registration, settings, s.workers, found.spec.name, archive)
        return VersionRequest(registration, settings, s.workers, found.spec.name)

    async def _start_node(
        self, found: _Workflow, node: WorkflowNode, request: VersionRequest, workers: Any = None
    ) -> None:
        """Raises ApiError. `workers` come from a snapshot: [minimum, maximum], unless users changed it."""
        try:
            version = await self._administrator.claim(request, at_startup=workers is not None)
        except PenstockError as e:
            text = f"Workflow Node {node.model} failed to register. Details: {e.message}"
            raise ApiError("WorkflowException", text, detail=e.detail) from e
        found.versions[node.name] = version
        if isinstance(workers, list) and len(workers) == 2 and all(type(n) is int and n >= 0 for n in workers):
            version.min_workers, version.max_workers = workers[0], max(workers)
        if version.min_workers:
            await self._administrator.start(version, keep=workers is not None)

    async def _remove(self, found: _Workflow) -> None:
        if found.running is not None:
            await found.running.close(float(self._properties.unregister_model_timeout))
        removals = (self._administrator.remove(version) for version in found.versions.values())
        ended = await asyncio.gather(*removals, return_exceptions=True)
        await self._release(found)
        for error in (e for e in ended if e is not None):
            log.error("workflow=%s node_not_removed error=%s", found.spec.name, describe(error))

    async def _release(self, found: _Workflow) -> None:
        """Closes the files, and removes their download."""
        await run_in_thread(found.files.close)
        await run_in_thread(partial(self._store.forget, found.url))

    async def close(self) -> None:
        """Releases the files of all workflows."""
        await asyncio.gather(*(run_in_thread(found.files.close) for found in self._found.values()))


def _stored(url: str) -> str:
    """The URL that opens an archive again: the store keeps a download under its name."""
    return mar_name(url) if url.startswith(("http://", "https://")) else url


def _of_workflow(error: ApiError, url: str | None) -> ApiError:
    """The error of an archive in the terms of workflows."""
    match error.kind:
        case "ModelNotFoundException":
            message = error.message.replace("Model not found at:", "Workflow not found in workflow store:")
            message = message.replace("Model store", "Workflow store")
            return ApiError("WorkflowNotFoundException", message, detail=error.detail)
        case "InvalidModelException":
            return ApiError("InvalidWorkflowException", f"{url}: {error.message}", detail=error.detail)
        case "DownloadArchiveException":
            return ApiError(error.kind, "Failed to download workflow archive file", detail=error.message)
    return error
