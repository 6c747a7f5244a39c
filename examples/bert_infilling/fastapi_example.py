"""BERT infilling with FastAPI: `python fastapi_example.py`.

    curl -X POST http://127.0.0.1:5005/stream -d 's=Happy birthday to [MASK].'

`/stream` is a coroutine: it awaits its answer without blocking a thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Annotated, Any

import uvicorn
from bert_model import SMALL, TextInfillingModel
from failures import error_response
from fastapi import FastAPI, Form, Request
from fastapi.responses import JSONResponse

from penstock import PenstockError, ThreadedStreamer

Texts = Annotated[list[str], Form()]


def infilling_app(model: TextInfillingModel, streamer: ThreadedStreamer) -> FastAPI:
    app = FastAPI(title="BERT infilling")

    @app.post("/naive")
    def naive(s: Texts) -> list[str]:
        return checked(model.predict(s))  # not a coroutine, so FastAPI runs it in a thread

    @app.post("/stream")
    async def stream(s: Texts) -> list[str]:
        return await streamer.apredict(s)

    @app.exception_handler(PenstockError)
    async def failed(request: Request, error: PenstockError) -> JSONResponse:
        status, text = error_response(error)
        return JSONResponse({"error": text}, status)

    return app


def checked(words: Sequence[Any]) -> list[str]:
    """The words. Raises the error of the first failed text, as the streamer does."""
    for word in words:
        if isinstance(word, Exception):
            raise word
    return list(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMALL, help="a folder, or a name such as bert-base-uncased")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5005)
    options = parser.parse_args()
    model = TextInfillingModel(options.model)
    with ThreadedStreamer(model.predict, batch_size=64, max_latency=0.1) as streamer:
        uvicorn.run(infilling_app(model, streamer), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
