"""Sends frames to the captioner, one by one and as a prebatch, and prints the captions.

python client.py [URL]
"""

import json
import pickle
import sys
import urllib.request

import numpy as np

URL = "http://127.0.0.1:12345/predictions/blip2"


def caption(frames, url=URL, key=""):
    """The captions of one frame [height, width, 3] or a prebatch [frames, height, width, 3], uint8."""
    headers = {"Content-Type": "application/octet-stream"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, pickle.dumps(frames, protocol=5), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def inference_key(path="key_file.json"):
    """The key that the server writes when it starts; empty if it requires none."""
    try:
        with open(path) as file:
            return json.load(file)["inference"]["key"]
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else URL
    frames = np.random.default_rng(0).integers(0, 256, (8, 270, 480, 3), dtype=np.uint8)
    key = inference_key()
    for frame in frames:
        print(*caption(frame, url, key))
    print(*caption(frames, url, key), sep="\n")
