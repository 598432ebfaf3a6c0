"""Make a small folder of JPEG images to train on: stripes, of a direction and a colour by class.

    python make_images.py /tmp/images --classes 10 --train 100 --val 20 --size 64

The same options give the same images. Each has noise, another phase and another brightness, so
that a network has something to learn, and can.
"""

from __future__ import annotations

import argparse
import colorsys
from pathlib import Path

import numpy as np
from PIL import Image


def main() -> None:
    """Write DATA/train/CLASS/NUMBER.jpeg and DATA/val/CLASS/NUMBER.jpeg."""
    parser = argparse.ArgumentParser(description="Make a small folder of JPEG images.")
    parser.add_argument("data", type=Path, help="folder to make")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--train", type=int, default=100, help="images of each class to train on")
    parser.add_argument("--val", type=int, default=20, help="images of each class to test on")
    parser.add_argument("--size", type=int, default=64, help="pixels of each side")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.data, args.classes, {"train": args.train, "val": args.val}, args.size, args.seed)


def make(folder: Path, classes: int, counts: dict[str, int], size: int, seed: int = 0) -> None:
    """Make the images of all classes, so many in each part."""
    for part, (name, count) in enumerate(sorted(counts.items())):
        for label in range(classes):
            place = folder / name / f"class-{label:04d}"
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                random = np.random.default_rng([seed, part, label, number])
                pixels = stripes(label / classes, size, random)
                Image.fromarray(pixels).save(place / f"{number:06d}.jpeg", quality=90)


def stripes(kind: float, size: int, random: np.random.Generator) -> np.ndarray:
    """Return one image (size, size, 3): of a direction and a colour that `kind`, 0 to 1, says."""
    y, x = np.mgrid[0:size, 0:size] / size
    angle = np.pi * kind + random.normal(0, 0.05)
    along = x * np.cos(angle) + y * np.sin(angle)
    wave = np.sin(2 * np.pi * (3 * along + random.uniform()))
    colour = np.array(colorsys.hsv_to_rgb(kind, 0.5, 1.0)) * random.uniform(0.5, 1.0)
    image = (0.6 + 0.4 * wave)[:, :, None] * colour + random.normal(0, 0.1, (size, size, 3))
    return (255 * image.clip(0, 1)).astype(np.uint8)


if __name__ == "__main__":
    main()
