"""Exits with 0 if the server in this container answers /ping with 200. A TorchServe key is used if there is one."""

import json
import os
import sys
import urllib.request

headers = {}
if os.path.exists("key_file.json"):
    with open("key_file.json") as file:
        headers["authorization"] = f"Bearer {json.load(file)['inference']['key']}"
request = urllib.request.Request(f"http://127.0.0.1:{os.environ.get('PORT', '8080')}/ping", headers=headers)
try:
    urllib.request.urlopen(request, timeout=4).close()
except OSError as e:
    sys.exit(f"{request.full_url}: {e}")
