"""The routes of TorchServe's workflow management API: list, register, describe and unregister workflows."""

import logging
from typing import Final

from penstock.serving.protocols.route import HttpRequest
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.config.properties import ListenerConfig
from penstock.torchserve.http.management import BAD, not_allowed
from penstock.torchserve.http.routes import Action, change_result, json_result
from penstock.torchserve.protocol.api import workflow_page
from penstock.torchserve.protocol.management import PAGE_SIZE, read_page, read_workflow
from penstock.torchserve.protocol.openapi import OpenApiResponse, Operation, QueryParameter
from penstock.types import ItemResult

log = logging.getLogger("penstock.frontends")

NO_WORKFLOW: Final[OpenApiResponse] = (404, "Workflow not found", "error")

LIST: Final = Operation(
    "GET",
    "/workflows",
    "listWorkflows",
    "Lists the registered workflows by name, each with its archive.",
    (
        QueryParameter("limit", "Workflows per page, from 1 to 100; other values mean 100", "integer", PAGE_SIZE),
        QueryParameter("next_page_token", "The nextPageToken of the previous page", "integer", 0),
    ),
    responses=((200, "OK", "object"), BAD),
)
REGISTER: Final = Operation(
    "POST",
    "/workflows",
    "registerWorkflow",
    "Registers a workflow and the models of its nodes. A JSON body takes the same parameters as the query.",
    (
        QueryParameter("url", "Name of an archive in the workflow store, or the URL of an archive", required=True),
        QueryParameter("workflow_name", "Name of the workflow, by default the archive's"),
        QueryParameter("response_timeout", "Maximum run time of a batch of any node, s", "integer", 120),
        QueryParameter("startup_timeout", "Maximum load time of a worker of any node, s", "integer", 120),
        QueryParameter("s3_sse_kms", "Whether KMS encrypts the archive in S3", "boolean", False),
    ),
    body="object",
    responses=(
        (200, "Every node has its workers", "status"),
        BAD,
        (404, "Archive not found", "error"),
        (409, "Registered already", "error"),
    ),
)
DESCRIBE: Final = Operation(
    "GET",
    "/workflows/{workflow_name}",
    "describeWorkflow",
    "Describes a workflow: its default settings and its graph.",
    responses=((200, "OK", "object"), NO_WORKFLOW),
)
UNREGISTER: Final = Operation(
    "DELETE",
    "/workflows/{workflow_name}",
    "unregisterWorkflow",
    "Unregisters a workflow and the models of its nodes.",
    responses=((200, "Unregistered", "status"), NO_WORKFLOW),
)


def workflow_actions(administration: Administrator, config: ListenerConfig) -> tuple[Action, ...]:
    """All routes. They need the management key; those that change workflows also need `enable_model_api`."""

    async def page(request: HttpRequest) -> ItemResult:
        return json_result(workflow_page(*administration.workflows.page(*read_page(request.query, _warn))))

    async def register(request: HttpRequest) -> ItemResult:
        found = read_workflow(request.query, request.content_type, request.body, _warn)
        return change_result(await administration.workflows.register(found))

    async def describe(request: HttpRequest) -> ItemResult:
        return json_result([administration.workflows.describe(request.names["workflow_name"])])

    async def unregister(request: HttpRequest) -> ItemResult:
        return change_result(await administration.workflows.unregister(request.names["workflow_name"]))

    changes = config.properties.enable_model_api
    return (
        Action(LIST, page),
        Action(REGISTER, register if changes else not_allowed),
        Action(DESCRIBE, describe),
        Action(UNREGISTER, unregister if changes else not_allowed),
    )


def _warn(replaced: str) -> None:
    log.warning("event=number_replaced %s", replaced)
