"""Two other clients for a folder of images: `vlm_clients.py KIND URL FOLDER`.

KIND is plain, saturate, saturate-by-default, or saturate-as-is, which sends the files without scaling them.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDES = (448, 336)
PROMPT = "Describe this image in one sentence."
AT_ONCE = 64


def data_url(file: Path) -> str:
    """The image as people send it: scaled, compressed again, base64."""
    from PIL import Image

    out = io.BytesIO()
    with Image.open(file) as image:
        small = image.convert("RGB")
        small.thumbnail(SIDES)
        small.save(out, "jpeg", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def body(file: Path, url_of: Callable[[Path], str] = data_url) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url_of(file)}}, {"type": "text", "text": PROMPT}]
    return {"model": "stand-in-vl", "messages": [{"role": "user", "content": content}], "max_tokens": 128}


def as_is(file: Path) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(file.read_bytes()).decode()


async def plain(url: str, files: list[Path]) -> list[str]:
    from openai import AsyncOpenAI

    client, limit = AsyncOpenAI(base_url=f"{url}/v1", api_key="none"), asyncio.Semaphore(AT_ONCE)

    async def caption(file: Path) -> str:
        async with limit:
            answer = await client.chat.completions.create(**body(file))
        return json.dumps({"image": file.name, "caption": answer.choices[0].message.content}) + "\n"

    return await asyncio.gather(*map(caption, files))


def saturate(url: str, files: list[Path], workers: int, url_of: Callable[[Path], str] = data_url) -> None:
    from saturate import pump

    pump(
        ({"id": file.name, "path": str(file)} for file in files),
        to_request=lambda row: body(Path(row["path"]), url_of),
        parse=lambda row, answer: {"caption": answer["choices"][0]["message"]["content"]},
        endpoint=f"{url}/v1",
        output="captions",
        id_key="id",
        prepare_workers=workers,
    )


if __name__ == "__main__":
    kind, server, folder = sys.argv[1:]
    images = sorted(Path(folder).iterdir())
    if kind == "plain":
        Path("captions.jsonl").write_text("".join(asyncio.run(plain(server, images))))
    elif kind == "saturate-as-is":
        saturate(server, images, 2, as_is)
    else:
        saturate(server, images, 2 if kind == "saturate" else 0)
