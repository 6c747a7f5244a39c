"""Shares of the descriptors: all ports together fit, and no port takes the share of another."""

from __future__ import annotations

import logging
import os
import resource

import pytest

from penstock.serving.http import descriptors
from penstock.serving.http.descriptors import RESERVED, none_left, raise_limit, share_connections

ENDLESS = resource.RLIM_INFINITY


class Limits:
    """The limits of a process. `frozen` refuses to change them."""

    def __init__(self, soft: int, hard: int) -> None:
        self.now = (soft, hard)
        self.frozen = False

    def getrlimit(self, _: int) -> tuple[int, int]:
        return self.now

    def setrlimit(self, _: int, wanted: tuple[int, int]) -> None:
        if self.frozen:
            raise ValueError("not allowed to raise maximum limit")
        self.now = wanted


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    found = Limits(1024, 4096)
    monkeypatch.setattr(descriptors.resource, "getrlimit", found.getrlimit)
    monkeypatch.setattr(descriptors.resource, "setrlimit", found.setrlimit)
    return found


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "found"),
    [(1024, 4096, 2000, 2000), (1024, 4096, 9000, 4096), (1024, ENDLESS, 9000, 9000), (5000, 9000, 2000, 5000)],
)
def test_the_soft_limit_is_raised_as_far_as_needed_and_allowed(
    limits: Limits, soft: int, hard: int, wanted: int, found: int
) -> None:
    limits.now = (soft, hard)
    assert raise_limit(wanted) == found
    assert limits.now == (found, hard)


def test_a_limit_that_cannot_be_raised_stays(limits: Limits) -> None:
    limits.frozen = True
    assert raise_limit(2000) == 1024
    limits.now = (ENDLESS, ENDLESS)
    assert raise_limit(10**9) > 10**9


def test_connections_that_fit_are_not_changed(limits: Limits, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert share_connections(1000, 1, 2) == (1000, 1000)
    assert limits.now == (3000 + RESERVED, 4096)
    assert not caplog.records


@pytest.mark.parametrize("hard", [64, 256, 1024, 4096, 60_000])
@pytest.mark.parametrize(("main", "side"), [(1, 0), (1, 2), (2, 2), (3, 0)])
def test_the_shares_of_all_ports_fit_together(
    limits: Limits, hard: int, main: int, side: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    limits.now = (64, hard)
    most, aside = share_connections(60_000, main, side)
    assert min(most, aside) >= 1
    assert main * most + side * aside <= hard - min(RESERVED, hard // 2)
    (record,) = caplog.records
    assert record.levelname == ("WARNING" if most < 1000 else "INFO")
    assert f"at_most_{most}_connections_for_inference_and_{aside}_for_each_other_port" in record.message


def test_the_last_descriptors_are_left_to_others(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = os.dup(0)
    os.close(lowest)
    limits.now = (lowest + 100, 4096)
    assert not none_left()
    limits.now = (lowest + 1, 4096)
    assert none_left()
    limits.now = (ENDLESS, ENDLESS)
    assert not none_left()

    def full(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(descriptors.os, "open", full)
    assert none_left()
