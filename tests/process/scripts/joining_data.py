"""The data of the scripts of joining.py, and the digest that they write after each step."""

import hashlib

import torch
from torch.utils.data import Dataset

SAMPLES, BATCH = 240, 24
STEPS = SAMPLES // BATCH  # of an epoch


class Numbers(Dataset):
    """Samples that are functions of their index."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, torch.randn(16, generator=torch.Generator().manual_seed(index))


def digest(model, optimizer):
    """Return a digest of all parameters, buffers and moments."""
    tensors = [*model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [each for each in state.values() if isinstance(each, torch.Tensor)]
    return hashlib.sha1(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
