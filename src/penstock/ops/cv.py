"""OpenCV, as ops use it: one thread a call. Instances are what runs at once, and more threads would only fight them."""

from __future__ import annotations

import cv2

cv2.setNumThreads(1)

__all__ = ["cv2"]
