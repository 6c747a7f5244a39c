"""BERT infilling behind gevent, with a worker process on each GPU.

    python flask_multigpu_example.py --devices 0,1,2,3
    curl -X POST http://127.0.0.1:5005/stream -d 's=Happy birthday to [MASK].'

The web server is one process that never loads the model. Its requests wait in greenlets, thousands of them if need be.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()  # before anything else is imported

import argparse  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402

import gevent  # noqa: E402
from bert_model import SMALL, ManagedBertModel  # noqa: E402
from gevent.pywsgi import WSGIServer  # noqa: E402
from web import infilling_app  # noqa: E402

from penstock import Streamer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMALL, help="a folder, or a name such as bert-base-uncased")
    parser.add_argument("--workers", type=int, help="processes; by default one a device, or one on the CPU")
    parser.add_argument("--devices", type=lambda text: text.split(","), help="such as 0,1; workers take turns on them")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5005)
    options = parser.parse_args()
    with Streamer(
        ManagedBertModel,
        batch_size=64,
        max_latency=0.1,
        worker_num=options.workers or len(options.devices or [0]),
        cuda_devices=options.devices,
        model_init_kwargs={"model": options.model},
        wait_for_worker_ready=True,
        worker_timeout=60,
    ) as streamer:
        server = WSGIServer((options.host, options.port), infilling_app(stream=streamer.predict), log=None)
        server.start()
        # Head and body of an answer are two writes; without this the second waits 40 ms for the receipt of the first.
        server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(f"listening on http://{options.host}:{server.server_port}", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):  # else Ctrl-C is raised in whatever request runs
            gevent.signal_handler(number, server.stop)
        server.serve_forever()


if __name__ == "__main__":
    main()
