"""The table of models as JSON."""

from __future__ import annotations

import json

import pytest

from penstock.errors import ModelNotFound
from penstock.serving.http.admin import model_body, models_body
from penstock.types import ModelStatus

STATUSES = [ModelStatus(name, version, "READY", 2, 1, 8, ("cpu",), 3) for name, version in ("b1", "a2", "a1")]


def test_models_are_listed_by_name_and_version():
    found = json.loads(models_body(STATUSES))["models"]
    assert [(m["name"], m["version"]) for m in found] == [("a", "1"), ("a", "2"), ("b", "1")]
    assert found[0]["ready_instances"] == 1


def test_a_model_lists_its_versions_and_an_unknown_one_the_nearest_name():
    assert len(json.loads(model_body(STATUSES, "a"))["versions"]) == 2
    statuses = [ModelStatus("digits", "1", "READY", 1, 1, 8, ("cpu",))]
    with pytest.raises(ModelNotFound, match="did you mean 'digits'"):
        model_body(statuses, "digit")
