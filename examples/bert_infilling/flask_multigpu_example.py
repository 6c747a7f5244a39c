"""BERT infilling behind gevent, with a worker process on each GPU.

    python flask_multigpu_example.py --devices 0,1,2,3
    curl -X POST http://127.0.0.1:5005/stream -d 's=Happy birthday to [MASK].'

The web server is one process that never loads the model. Its requests wait in greenlets, thousands of them if need be.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()  # before anything else is imported

import argparse  # noqa: E402

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
        print(f"listening on http://{options.host}:{server.server_port}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.stop(timeout=5)


if __name__ == "__main__":
    main()
