"""A model that tells of its request."""

from typing import Any


def claims(items: list[Any], requests: list[Any]) -> list[Any]:
    return [[request.claims, request.target] for request in requests]
