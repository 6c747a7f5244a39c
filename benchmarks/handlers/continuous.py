"""A handler for continuous batching: a step sends one byte per active request, and sleeps STEP_S + ROW_S x active."""

import os
import time

STEP_S = float(os.environ.get("STEP_S", "0"))
ROW_S = float(os.environ.get("ROW_S", "0"))


def stopping(cache, request_id):
    def stop(result):
        cache[request_id] -= 1
        if cache[request_id]:
            return False
        del cache[request_id]
        return True

    return stop


class Handler:
    def initialize(self, context):
        context.cache = {}

    def handle(self, data, context):
        cache, ids = context.cache, context.request_ids.values()
        for request_id, row in zip(ids, data, strict=True):
            if request_id not in cache:
                cache[request_id] = row["body"] if isinstance(row["body"], int) else 2
        if STEP_S:
            time.sleep(STEP_S + ROW_S * len(data))
        context.stopping_criteria = [stopping(cache, request_id) for request_id in ids]
        return ["x"] * len(data)
