"""OpenCV, as ops use it.

One thread a call: instances are what runs at once, and more threads would only fight them. And no lines of its own on
stderr for each broken image: the item's error says it.
"""

from __future__ import annotations

import cv2

cv2.setNumThreads(1)
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

__all__ = ["cv2"]
