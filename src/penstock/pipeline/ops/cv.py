"""OpenCV, as ops use it.

One thread a call: instances are what runs at once, and more threads would only fight them. And no lines of its own on
stderr for each broken image: the item's error says it. What libpng and libjpeg write there cannot be turned off.
"""

from __future__ import annotations

import cv2

cv2.setNumThreads(1)
_set_level = getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel  # before OpenCV 5, and since
_set_level(0)

__all__ = ["cv2"]
