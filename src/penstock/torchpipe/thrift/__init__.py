"""A Thrift listener for the service of TorchPipe's examples: `ping` and `infer_batch`."""
