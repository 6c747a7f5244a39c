"""The descriptors in the package match the .proto files."""

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

import penstock

ROOT = Path(penstock.__file__).parent
NATIVE = ROOT / "serving" / "protocols" / "protos"
TORCHSERVE = ROOT / "torchserve" / "protos"


@pytest.mark.parametrize(
    ("folder", "includes", "more"),
    [(NATIVE, [NATIVE], []), (TORCHSERVE, [TORCHSERVE, NATIVE], ["health.proto", "reflection.proto"])],
)
def test_the_descriptors_match_the_protos(tmp_path, folder, includes, more):
    protoc = pytest.importorskip("grpc_tools.protoc")
    paths = [f"-I{path}" for path in (*includes, Path(protoc.__file__).parent / "_proto")]
    files = [str(path) for path in sorted(folder.glob("*.proto"))] + more
    written = tmp_path / "descriptors.binpb"
    assert protoc.main(["", *paths, "--include_imports", f"--descriptor_set_out={written}", *files]) == 0
    ours = {f.name: f for f in FileDescriptorSet.FromString((folder / "descriptors.binpb").read_bytes()).file}
    fresh = {f.name: f for f in FileDescriptorSet.FromString(written.read_bytes()).file}
    own = {name for name in ours if not name.startswith("google/protobuf/")}  # those are of the version of protoc
    assert own == {name for name in fresh if not name.startswith("google/protobuf/")}
    assert all(ours[name] == fresh[name] for name in own), "write them anew with: make protos"
