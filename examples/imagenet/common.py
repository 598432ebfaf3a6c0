"""What the three ImageNet scripts have in common: options, images, ResNets, evaluation, a ledger.

Nothing here knows how a script continues after a fault, and only `keep_best` needs elastane.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, by colour
ENDINGS = {".jpeg", ".jpg", ".png"}
SMALL = 64  # images below this lose nothing before the first block


def parse(description: str | None) -> argparse.Namespace:
    """Parse the command line, which is the same for all three."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0] if description else "")
    add = parser.add_argument
    add("data", type=Path, help="folder with train/CLASS/*.jpeg and val/CLASS/*.jpeg")
    add("-a", "--arch", choices=sorted(ARCHITECTURES), default="resnet18")
    add("-j", "--workers", type=int, default=2, help="processes that read images, for each worker")
    add("--epochs", type=int, default=90)
    add("-b", "--batch-size", type=int, default=256, help="images of a step, over all workers")
    add("--lr", type=float, default=0.1, help="divided by 10 each 30 epochs")
    add("--momentum", type=float, default=0.9)
    add("--wd", "--weight-decay", type=float, default=1e-4, dest="weight_decay")
    add("--checkpoint", default="checkpoints", help="folder, shared or of this node alone")
    add("--every-steps", type=int, help="steps between checkpoints (as often as it pays)")
    add("-p", "--print-freq", type=int, default=10, metavar="STEPS")
    add("--image-size", type=int, default=224)
    add("--width", type=int, default=64, help="channels of the first block")
    add("--seed", type=int, default=0)
    add("--ledger", type=Path, help="folder for what each worker did, a line a step")
    return parser.parse_args()


class Images(Dataset[tuple[Tensor, int, int]]):
    """A folder of images by class: (image, class, number of the sample).

    Images to train on are cropped and mirrored, by nothing but seed, epoch and number: so a step
    that is done again, by whatever worker, sees what it saw before. The epoch is the sampler's.
    """

    def __init__(self, folder: Path, size: int, seed: int | None = None) -> None:
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        self.samples = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in ENDINGS
        ]
        self.classes, self.size, self.seed = len(classes), size, seed
        self.sampler: Any = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Tensor, int, int]:
        path, label = self.samples[number]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        draw = Random(f"{self.seed}/{self.sampler.epoch}/{number}") if self.sampler else None
        box = middle(image) if draw is None else some_part(image, draw)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        if draw is not None and draw.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(self.size, self.size, 3).permute(2, 0, 1) / 255
        mean, deviation = torch.tensor(MEAN), torch.tensor(DEVIATION)
        return (pixels - mean[:, None, None]) / deviation[:, None, None], label, number


def middle(image: Image.Image) -> tuple[float, float, float, float]:
    """Return seven eighths of the largest square in the middle."""
    side = min(image.size) * 7 / 8
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return left, top, left + side, top + side


def some_part(image: Image.Image, draw: Random) -> tuple[float, float, float, float]:
    """Return a part of a quarter of the area to all of it, of a shape from 3:4 to 4:3."""
    area, shape = draw.uniform(0.25, 1), draw.uniform(3 / 4, 4 / 3)
    width = min(image.width, image.width * (area * shape) ** 0.5)
    height = min(image.height, image.height * (area / shape) ** 0.5)
    left, top = draw.uniform(0, image.width - width), draw.uniform(0, image.height - height)
    return left, top, left + width, top + height


def datasets(args: argparse.Namespace) -> tuple[Images, Images]:
    """Return the images to train on, and those to test on."""
    train = Images(args.data / "train", args.image_size, args.seed)
    return train, Images(args.data / "val", args.image_size)


class Block(nn.Module):
    """Convolutions, added to what came in."""

    def __init__(self, channels: tuple[int, ...], kernels: tuple[int, ...], stride: int) -> None:
        super().__init__()
        steps: list[nn.Module] = []
        strided = kernels.index(3)  # the first that sees its neighbours
        for n, kernel in enumerate(kernels):
            steps += convolution(
                channels[n], channels[n + 1], kernel, stride if n == strided else 1
            )
            steps.append(nn.ReLU())
        self.body = nn.Sequential(*steps[:-1])
        same = channels[0] == channels[-1] and stride == 1
        projection = convolution(channels[0], channels[-1], 1, stride)
        self.way = nn.Identity() if same else nn.Sequential(*projection)

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes out, of half the height and width where the stride is 2."""
        return nn.functional.relu(self.body(x) + self.way(x))


def basic(given: int, width: int, stride: int) -> tuple[Block, int]:
    """Two convolutions of 3 x 3."""
    return Block((given, width, width), (3, 3), stride), width


def bottleneck(given: int, width: int, stride: int) -> tuple[Block, int]:
    """One of 3 x 3 between two of 1 x 1."""
    return Block((given, width, width, 4 * width), (1, 3, 1), stride), 4 * width


ARCHITECTURES = {
    "resnet18": (basic, (2, 2, 2, 2)),
    "resnet34": (basic, (3, 4, 6, 3)),
    "resnet50": (bottleneck, (3, 4, 6, 3)),
    "resnet101": (bottleneck, (3, 4, 23, 3)),
}


def resnet(arch: str, classes: int, width: int = 64, image_size: int = 224) -> nn.Sequential:
    """Return a ResNet; for images below 64 pixels without the first strides."""
    block, lengths = ARCHITECTURES[arch]
    if image_size < SMALL:
        parts = [*convolution(3, width, 3, 1), nn.ReLU()]
    else:
        parts = [*convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    given = width
    for stage, length in enumerate(lengths):
        for n in range(length):
            made, given = block(given, width << stage, 2 if stage and not n else 1)
            parts.append(made)
    net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, classes))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


def convolution(given: int, made: int, kernel: int, stride: int) -> list[nn.Module]:
    """Return a convolution that keeps the size but for its stride, and what normalises it."""
    conv = nn.Conv2d(given, made, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(made)]


def sgd(net: nn.Module, args: argparse.Namespace) -> torch.optim.SGD:
    """Return the optimizer."""
    return torch.optim.SGD(
        net.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )


def set_rate(optimizer: torch.optim.Optimizer, args: argparse.Namespace, epoch: int) -> None:
    """Set the learning rate of an epoch."""
    for group in optimizer.param_groups:
        group["lr"] = args.lr * 0.1 ** (epoch // 30)


def device_of_process() -> torch.device:
    """Return this worker's GPU, by its local rank; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


@torch.no_grad()
def accuracy(net: nn.Module, images: Images, device: torch.device) -> float:
    """Return the fraction of images that is classified rightly."""
    net.eval()
    right = 0
    for batch, labels, _ in DataLoader(images, 64):
        right += int((net(batch.to(device)).argmax(dim=1).cpu() == labels).sum())
    net.train()
    return right / len(images)


def keep_best(args: argparse.Namespace, net: nn.Module, reached: float, step: int) -> None:
    """Save the weights beside the checkpoints if they are the best so far. On one worker."""
    import elastane

    best = f"{args.checkpoint}-best"
    so_far = elastane.load_checkpoint(best)
    if so_far is None or reached > so_far.state["accuracy"]:
        elastane.save_checkpoint(best, {"net": net, "accuracy": reached}, step=step, keep=1)


class Ledger:
    """Tells what happens: to people as rank 0, and in a file of its own with --ledger.

    A line is written where a worker has done its part of a step, with the numbers of its samples.
    `world` names the world that did it: all its workers say the same, and those of no other.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._path: Path | None = None
        self._print_freq = args.print_freq
        if args.ledger is not None:
            args.ledger.mkdir(parents=True, exist_ok=True)
            self._path = args.ledger / f"{os.getpid()}-{time.time_ns()}.jsonl"

    def begins(self, rank: int, step: int, where: str = "") -> None:
        """Print from where this process continues."""
        self._write(what="begins", rank=rank, step=step, where=where)
        if rank == 0:
            print(f"begins after step {step}{' of ' * bool(where)}{where}", flush=True)

    def did(self, place: dict[str, Any], samples: Iterable[int], loss: Tensor) -> None:
        """Tell of this worker's part of a step; `place` has rank, world, epoch and step."""
        self._write(what="did", **place, samples=[int(each) for each in samples])
        if place["rank"] == 0 and place["step"] % self._print_freq == 0:
            print(f"epoch {place['epoch']} step {place['step']} loss {loss:.3f}", flush=True)

    def committed(self, place: dict[str, Any]) -> None:
        """Tell that a step has happened, where that is known apart."""
        self._write(what="committed", **place)

    def tested(self, epoch: int, reached: float) -> None:
        """Tell how good the weights are after an epoch."""
        self._write(what="tested", epoch=epoch, accuracy=reached)
        print(f"epoch {epoch}: accuracy {reached:.1%} on images that were held out", flush=True)

    def ends(self, rank: int, step: int, net: nn.Module) -> None:
        """Tell what it came to: a digest of the weights, and another of the buffers."""
        weights, buffers = digest(net.named_parameters()), digest(net.named_buffers())
        self._write(what="ends", rank=rank, step=step, weights=weights, buffers=buffers)
        if rank == 0:
            print(f"ends after step {step}; weights {weights}", flush=True)

    def _write(self, **values: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"time": time.time(), "pid": os.getpid(), **values}) + "\n")


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of tensors by name, as hexadecimal digits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def name_of_world() -> str:
    """Return a name that all workers of the default process group have, and no other group's."""
    words = [f"{time.time_ns()}"]
    dist.broadcast_object_list(words)
    return words[0]
