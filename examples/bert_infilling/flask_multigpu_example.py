"""BERT infilling with gevent and one worker process per GPU.

    python flask_multigpu_example.py --devices 0,1,2,3
    curl -X POST http://127.0.0.1:5005/stream -d 's=Happy birthday to [MASK].'

The web server is one process that never loads the model. Thousands of requests can wait in greenlets.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()  # before all other imports

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
    parser.add_argument("--workers", type=int, help="processes; default: one per device, or one on the CPU")
    parser.add_argument(
        "--devices", type=lambda text: text.split(","), help="such as 0,1; workers are assigned in turn"
    )
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
        # A response is two writes; without this the second waits 40 ms for the acknowledgement of the first.
        server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(f"listening on http://{options.host}:{server.server_port}", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):  # otherwise Ctrl-C interrupts the running request
            gevent.signal_handler(number, server.stop)
        server.serve_forever()


if __name__ == "__main__":
    main()
