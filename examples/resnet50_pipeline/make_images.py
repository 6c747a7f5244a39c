"""Writes photos into images/: `python make_images.py [FOLDER] [--count 300]`.

They are JPEG crops of the photos in scikit-learn and scikit-image, 400 to 600 pixels per side, and the same on every
run.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np

FOLDER = Path(__file__).parent / "images"
PHOTOS = {
    "sklearn": ["datasets/images/china.jpg", "datasets/images/flower.jpg"],
    "skimage": [
        "data/astronaut.png",
        "data/chelsea.png",
        "data/coffee.png",
        "data/hubble_deep_field.jpg",
        "data/motorcycle_left.png",
        "data/rocket.jpg",
    ],
}
QUALITY = 90


def photos() -> list[np.ndarray]:
    """The photos of the installed packages, BGR uint8 `[height, width, 3]`."""
    found = []
    for package, files in PHOTOS.items():
        spec = find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            found += [cv2.imread(str(Path(root) / file), cv2.IMREAD_COLOR) for file in files]
    found = [photo for photo in found if photo is not None]
    if not found:
        raise SystemExit("no photos: install scikit-learn and scikit-image")
    return found


def crop(photo: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A part of a photo, scaled to 400 to 600 pixels a side, one of two mirrored."""
    height, width = (int(n) for n in random.integers(400, 601, 2))
    share = random.uniform(0.6, 1.0) * min(photo.shape[0] / height, photo.shape[1] / width)
    part_height, part_width = int(height * share), int(width * share)
    top = int(random.integers(0, photo.shape[0] - part_height + 1))
    left = int(random.integers(0, photo.shape[1] - part_width + 1))
    part = photo[top : top + part_height, left : left + part_width]
    scaled = cv2.resize(part, (width, height), interpolation=cv2.INTER_CUBIC)
    return cv2.flip(scaled, 1) if random.random() < 0.5 else scaled


def make(folder: Path, count: int) -> None:
    """Writes `count` JPEGs into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    known, random = photos(), np.random.default_rng(7)
    for n in range(count):
        image = crop(known[n % len(known)], random)
        cv2.imwrite(str(folder / f"{n:04d}.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--count", type=int, default=300)
    given = parser.parse_args()
    make(given.folder, given.count)
    total = sum(file.stat().st_size for file in given.folder.glob("*.jpg"))
    print(f"{given.folder}: {given.count} images, {total / given.count / 1000:.0f} kB each")


if __name__ == "__main__":
    main()
