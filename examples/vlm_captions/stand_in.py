"""A stand-in for a vision-language model behind OpenAI's API: its costs, limits and faults, and no GPU.

    python stand_in.py --port 8000 --rate 100

Its caption names the size and the digest of each image, so that two runs give the same captions, and another image
gives another one. `--rate` and `--latency` are its costs, and `--faults N` lets every Nth image fail in one of the ways
that engines and providers know: a full queue, a server error, a lost connection, an error with status 200; or, for each
attempt, a refusal by the content filter, an answer that is cut, empty, not JSON or 10 MB long.
"""

from __future__ import annotations

import argparse
import asyncio
import binascii
import itertools
import json
import struct
import time
import zlib
from collections import Counter
from typing import Any

MODEL = "stand-in-vl"
DATA = "data:image/jpeg;base64,"
PATCH = 28 * 28  # pixels of a token
ONCE = ("429", "500", "hang up", "200 with an error")  # the next attempt succeeds
ALWAYS = ("refused", "cut", "empty", "prose", "long")
Response = tuple[int, Any, tuple[str, ...]]


class HangUp(Exception):
    """The connection ends without a response."""


class StandIn:
    """The server: `rate` requests a second altogether, `latency_s` each, at most `slots` at a time.

    It answers 429 beyond `queue` waiting requests. `tokens` are those of answers that were generated whole, for prompts
    and completions: a request whose client leaves is aborted.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.waiting = self.running = self.served = 0
        self.most_running = 0
        self.tokens = [0, 0]
        self.busy_s = self.first_s = self.last_s = 0.0
        self.answers: Counter[str] = Counter()  # by status or fault
        self.seen: Counter[int] = Counter()  # requests for each digest
        self.storm_until_s = 0.0  # of 429
        self._slots = asyncio.Semaphore(args.slots)
        self._free_s = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while (line := await reader.readline()).strip():
                method, path, _ = line.decode().split(" ", 2)
                headers = {}
                while (header := (await reader.readline()).decode()).strip():
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                answer = asyncio.ensure_future(self.respond(method, path.rstrip("/"), headers, body))
                gone = asyncio.ensure_future(reader.read(1))  # the client sends nothing more before the response
                try:
                    await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done():
                        break
                    status, found, more = answer.result()
                finally:
                    for task in (answer, gone):
                        task.cancel()
                    await asyncio.gather(answer, gone, return_exceptions=True)
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                kind = "text/plain" if isinstance(found, bytes) else "application/json"
                lines = (f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(data)}", *more, "", "")
                writer.write("\r\n".join(lines).encode() + data)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, HangUp):
            pass
        finally:
            writer.close()

    async def respond(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Response:
        """(status, body, further headers)."""
        args = self.args
        if path == "/metrics":
            text = f"vllm:num_requests_running{{}} {self.running}\nvllm:num_requests_waiting{{}} {self.waiting}\n"
            return 200, text.encode(), ()
        if path == "/stats":
            return 200, self.stats(), ()
        if args.token and headers.get("authorization") != f"Bearer {args.token}":
            return self.error(401, "the token is not valid, or has expired")
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": args.model, "object": "model", "root": args.model}]}, ()
        if (method, path) != ("POST", "/v1/chat/completions"):
            return self.error(404, f"there is no {method} {path}")
        if time.monotonic() < self.storm_until_s or self.waiting >= args.queue:
            return self.error(429, "too many requests", "Retry-After: 0.2")
        request = json.loads(body)
        if request["model"] != args.model:
            return self.error(404, f"The model `{request['model']}` does not exist.")
        return await self.complete(request)

    def stats(self) -> dict[str, Any]:
        """What was done, for tests and benchmarks; `busy` is the share of the time since the first request."""
        span_s = self.last_s - self.first_s
        return {
            "served": self.served, "tokens": self.tokens, "answers": self.answers, "span_s": span_s,
            "busy": self.busy_s / span_s if span_s else 0.0, "most_running": self.most_running,
        }  # fmt: skip

    def error(self, status: int, message: str, *headers: str) -> Response:
        self.answers[str(status)] += 1
        return status, {"error": {"message": message, "type": "error", "code": status}}, headers

    async def complete(self, request: dict[str, Any]) -> Response:
        """The completion of a chat."""
        texts, images = [], []
        for message in request["messages"]:
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part["type"] == "text":
                    texts.append(part["text"])
                else:
                    images.append(part["image_url"]["url"])
        try:
            sizes = [size_of(url) for url in images]
        except ValueError as wrong:
            return self.error(400, f"cannot load the image: {wrong}")
        if any(max(size) > self.args.max_side for size in sizes):
            return self.error(400, f"the image is too large: at most {self.args.max_side} pixels a side")
        prompt_tokens = sum(w * h // PATCH + 1 for w, h in sizes) + sum(len(text) // 4 for text in texts)
        if prompt_tokens > self.args.context:
            return self.error(400, f"This model's maximum context length is {self.args.context} tokens.")
        digest = zlib.crc32("".join(images).encode())
        repaired = request["messages"][-2:-1] and request["messages"][-2]["role"] == "assistant"
        fault = self.fault(digest)
        self.seen[digest] += 1
        if fault in ONCE:
            self.answers[fault] += 1
            if fault == "429":
                return 429, {"error": {"message": "too many requests"}}, ("Retry-After: 0.2",)
            if fault == "500":
                return 500, {"error": {"message": "EngineDeadError"}}, ()
            if fault == "hang up":
                raise HangUp
            return 200, {"error": {"message": "the engine is overloaded", "code": 500}}, ()
        await self.work()
        text, reason, refusal = self.describe(images, sizes, digest), "stop", None
        if request.get("response_format"):
            text = json.dumps({"caption": text})
        if fault == "refused":
            text, reason, refusal = "", "content_filter", "I cannot help with that."
        elif fault == "cut":
            text, reason = text[: len(text) // 2], "length"
        elif fault == "empty":
            text = ""
        elif fault == "prose" and not repaired:
            text = f"Sure! Here it is: {text}"
        elif fault == "long":
            text = "very " * 2_000_000
        self.answers[fault or "200"] += 1
        tokens = prompt_tokens, len(text) // 4 + 1
        self.tokens = [one + other for one, other in zip(self.tokens, tokens, strict=True)]
        message = {"role": "assistant", "content": text, "refusal": refusal}
        usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return 200, {"object": "chat.completion", "model": self.args.model, "choices": [choice], "usage": usage}, ()

    def describe(self, images: list[str], sizes: list[tuple[int, int]], digest: int) -> str:
        """The caption of images, which are data URLs."""
        return f"{' and '.join(f'a picture of {w}x{h}' for w, h in sizes)} with digest {digest:08x}"

    def fault(self, digest: int) -> str:
        """How the next request for these images fails, or ""."""
        if not self.args.faults or digest % self.args.faults:
            return ""
        kinds = ONCE + ALWAYS
        kind = kinds[digest // self.args.faults % len(kinds)]
        return "" if kind in ONCE and self.seen[digest] else kind

    async def work(self) -> None:
        """Takes the time of one request."""
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            now = time.monotonic()
            self.first_s = self.first_s or now
            self._free_s = max(now, self._free_s) + 1 / self.args.rate
            await asyncio.sleep(max(self._free_s - now, self.args.latency))
            self.served += 1
            self.busy_s += 1 / self.args.rate
            self.last_s = time.monotonic()
        finally:
            self.running -= 1
            self._slots.release()


def size_of(url: str) -> tuple[int, int]:
    """Width and height of a JPEG in a data URL or a file. Raises ValueError."""
    if url.startswith("file://"):
        with open(url.removeprefix("file://"), "rb") as file:
            data = file.read(65_536)
    elif url.startswith(DATA):
        data = binascii.a2b_base64(url[len(DATA) : len(DATA) + 65_536 // 4 * 4])
    else:
        raise ValueError("it is no data URL of a JPEG, and no file URL")
    at = 2
    for _ in itertools.repeat(None, 1000):
        if at + 9 > len(data) or data[at] != 0xFF:
            break
        if 0xC0 <= data[at + 1] <= 0xCF and data[at + 1] not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise ValueError("it is no JPEG")


def parser() -> argparse.ArgumentParser:
    """The options of the stand-in."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--port", type=int, default=8000)
    found.add_argument("--model", default=MODEL)
    found.add_argument("--token", help="required of clients")
    found.add_argument("--rate", type=float, default=100.0, help="requests a second [100]")
    found.add_argument("--latency", type=float, default=0.05, help="seconds of a request at least [0.05]")
    found.add_argument("--slots", type=int, default=32, help="requests that run together [32]")
    found.add_argument("--queue", type=int, default=1000, help="requests that wait [1000]")
    found.add_argument("--max-side", type=int, default=8192, help="of an image, in pixels [8192]")
    found.add_argument("--context", type=int, default=32_768, help="tokens of a prompt [32768]")
    found.add_argument("--faults", type=int, default=0, help="let every Nth image fail [0: none]")
    return found


async def main(args: argparse.Namespace) -> None:
    """Serves until it is interrupted."""
    server = await asyncio.start_server(StandIn(args).serve, "127.0.0.1", args.port, limit=1 << 22)
    async with server:
        print(f"stand-in: http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    try:
        asyncio.run(main(parser().parse_args()))
    except KeyboardInterrupt:
        pass
