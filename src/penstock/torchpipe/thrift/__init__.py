"""A listener for Thrift's callers of one service: `ping` and `infer_batch`."""
