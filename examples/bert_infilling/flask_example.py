"""BERT infilling with Flask, without and with batching: `python flask_example.py`.

    curl -X POST http://127.0.0.1:5005/naive -d 's=Happy birthday to [MASK].'
    curl -X POST http://127.0.0.1:5005/stream -d 's=Happy birthday to [MASK].'

Each request runs in its own thread. `/naive` calls the model there; `/stream` passes the text to the streamer, which
batches the texts of all threads.
"""

from __future__ import annotations

import argparse

from bert_model import SMALL, TextInfillingModel
from web import infilling_app

from penstock import ThreadedStreamer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMALL, help="a folder, or a name such as bert-base-uncased")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5005)
    options = parser.parse_args()
    model = TextInfillingModel(options.model)
    with ThreadedStreamer(model.predict, batch_size=64, max_latency=0.1) as streamer:
        app = infilling_app(naive=model.predict, stream=streamer.predict)
        app.run(options.host, options.port, threaded=True)


if __name__ == "__main__":
    main()
