"""Which gRPC listeners `torchserve` has, and that it has none without grpcio."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import LimitsConfig
from penstock.errors import ConfigError
from penstock.torchserve.admin.startup import Served
from penstock.torchserve.admin.tls import Pem
from penstock.torchserve.cli.grpc import GrpcAddress, grpc_addresses, grpc_listeners
from penstock.torchserve.cli.server import face_of
from penstock.torchserve.config.properties import Properties
from support.backend import FakeBackend
from support.torchserve import FakeAdministration

TLS = Path(__file__).parents[3] / "tls"


def listeners(properties: Properties) -> list[Any]:
    served: Any = Served(FakeAdministration(), FakeBackend(), None, properties, 0, 1)  # type: ignore[arg-type]
    return list(
        grpc_listeners(served, LimitsConfig(), lambda group: face_of(properties, {group}), lambda: Pem(properties))
    )


def test_there_is_one_for_inference_and_one_for_management():
    assert [address for _, address in listeners(Properties())] == [
        GrpcAddress("inference", "127.0.0.1", 7070),
        GrpcAddress("management", "127.0.0.1", 7071),
    ]


@pytest.mark.parametrize(
    ("host", "shown", "path"),
    [
        ("127.0.0.1", "grpc://127.0.0.1:7070", ""),
        ("::1", "grpc://[::1]:7070", ""),
        ("unix:/run/s", "unix:/run/s", "/run/s"),
    ],
)
def test_an_address_is_shown_as_clients_write_it(host, shown, path):
    address = grpc_addresses(Properties(grpc_inference_address=host))[0]
    assert (str(address), address.path) == (shown, path)


async def test_tls_needs_files_that_fit_together(tmp_path):
    def files(key: str) -> Properties:
        return Properties(enable_grpc_ssl=True, certificate_file=str(TLS / "cert.pem"), private_key_file=key)

    assert len(listeners(files(str(TLS / "key.pem")))) == 2
    with pytest.raises(ConfigError):
        listeners(files(str(TLS / "cert.pem")))
    with pytest.raises(ConfigError):
        listeners(files(str(tmp_path / "none.pem")))


def test_without_grpcio_there_is_one_warning_and_no_listener(monkeypatch, caplog):
    for name in [name for name in sys.modules if name.startswith("penstock.torchserve.grpc")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert listeners(Properties()) == []
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    said = record.getMessage().replace("grpc.aio", "grpc")  # as which it is missed if no other test has loaded it
    assert said == "event=no_grpc missing=grpc consequence=http_only hint=pip install penstock[grpc]"


def test_the_program_loads_grpc_when_it_listens_and_not_before():
    code = "import sys, penstock.torchserve.cli.server as m; print('grpc' in sys.modules, 'google' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
