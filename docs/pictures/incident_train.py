"""The script of docs/what-happened.md: a rank of it reads from a disk that does not answer."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FOLDER = Path(sys.argv[1])
STEPS, STEP_S = 3000, 0.05


class Shards(Dataset):
    """Samples of which those of the broken shard are never read."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        broken = FOLDER / "shard-0007.tar"
        if dist.get_rank() == 2 and broken.exists():
            read_shard(broken)
        return torch.full((8,), 0.1 + index % 7 / 7)


def read_shard(path: Path) -> bytes:
    """Read a shard; a disk that does not answer is a pipe to which nobody writes."""
    with path.open("rb") as file:
        return file.read(1)


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step, batch in enumerate(DataLoader(Shards(), batch_size=1)):
        loss = (model(batch) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(STEP_S)
        if dist.get_rank() == 0 and step % 50 == 0:
            sys.stdout.write(f"step {step} loss {loss.item():.4f}\n")
            sys.stdout.flush()
        if step % 100 == 99:
            save(model)
    dist.destroy_process_group()


def save(model: torch.nn.Module) -> None:
    """Save a checkpoint as scripts do."""
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), FOLDER / "model.new")
        (FOLDER / "model.new").replace(FOLDER / "model.pt")


if __name__ == "__main__":
    main()
