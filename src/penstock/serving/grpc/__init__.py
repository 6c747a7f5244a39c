"""The gRPC listener, and the Open Inference service of the native server."""
