"""The gRPC listener, and the Open Inference service of the native server."""

import os

# gRPC's core writes to stderr in a format of its own, also lines that any client can cause
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
