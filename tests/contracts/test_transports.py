"""Every transport keeps the contract of transports."""

from __future__ import annotations

import pytest

from penstock.testing.transports import TRANSPORT_CHECKS, check_transport
from penstock.transports.make import make_transport


@pytest.mark.parametrize("name", ["inline", "thread", "process"])
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_transport(name, check):
    await check(
        lambda spec, pool: make_transport(name, spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20)
    )


def test_the_process_transport_keeps_the_contract_on_uvloop():
    uvloop = pytest.importorskip("uvloop")
    uvloop.run(
        check_transport(
            lambda spec, pool: make_transport(
                "process", spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20
            )
        )
    )
