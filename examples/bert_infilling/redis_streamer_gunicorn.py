"""BERT infilling with separate web servers and workers, connected by Redis.

    redis-server
    python redis_streamer_gunicorn.py --workers 2                                           # the workers
    gunicorn redis_streamer_gunicorn:app -b 127.0.0.1:5005 -k gevent --workers 2            # the web servers
    curl -X POST http://127.0.0.1:5005/stream -d 's=Happy birthday to [MASK].'

Both read the address of Redis from the environment: `REDIS=redis://:password@host:6379/0`. The web servers load neither
torch nor the model and need no GPU. Any number of both may start and stop at any time.
"""

from __future__ import annotations

import argparse
import os

from web import infilling_app

from penstock import RedisStreamer, run_redis_workers_forever

REDIS = os.environ.get("REDIS", "localhost:6379")
PREFIX = "bert"  # separates the models that share a Redis

# Above the default of 20 s: the first requests may arrive while the workers still load their model.
app = infilling_app(stream=RedisStreamer(redis_broker=REDIS, prefix=PREFIX, worker_timeout=60).predict)


def main() -> None:
    from bert_model import SMALL, ManagedBertModel

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMALL, help="a folder, or a name such as bert-base-uncased")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--devices", type=lambda text: text.split(","), help="such as 0,1; workers are assigned in turn"
    )
    options = parser.parse_args()
    run_redis_workers_forever(
        ManagedBertModel,
        batch_size=64,
        max_latency=0.1,
        worker_num=options.workers,
        cuda_devices=options.devices,
        redis_broker=REDIS,
        prefix=PREFIX,
        model_init_kwargs={"model": options.model},
    )


if __name__ == "__main__":
    main()
