"""The bytes around a tensor's data make a file that torch.load and zip readers accept."""

import io
import math

import pytest
import torch

from elastane.checkpoint.layout import ALIGN_BYTES, frame_of

DTYPES = sorted(
    {
        kind
        for kind in vars(torch).values()
        if isinstance(kind, torch.dtype)
        and "q" not in str(kind).removeprefix("torch.")[:2]
        and not str(kind).startswith(("torch.int1", "torch.int2", "torch.int3", "torch.int4"))
        and not str(kind).startswith(("torch.int5", "torch.int6", "torch.int7", "torch.bits"))
        and str(kind)[6:] not in [f"uint{n}" for n in range(1, 8)]
        and "quint" not in str(kind)
    }
    | {torch.int16, torch.int32, torch.int64},
    key=str,
)
SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 3), (4, 1, 7), (1000, 33)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_reads_a_blob_of_every_kind_and_shape(dtype):
    for shape in SHAPES:
        raw = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
        frame = frame_of(dtype, shape)
        assert frame.data_bytes == raw.numel()
        blob = frame.head + raw.numpy().tobytes() + frame.tail
        read = torch.load(io.BytesIO(blob), weights_only=True)
        assert (read.dtype, tuple(read.shape)) == (dtype, shape)
        assert read.is_contiguous()
        assert torch.equal(read.reshape(-1).view(torch.uint8), raw), (dtype, shape)


def test_data_and_the_next_blob_are_aligned():
    for shape in SHAPES:
        frame = frame_of(torch.float32, shape)
        assert len(frame.head) % ALIGN_BYTES == 0
        assert frame.size_bytes % ALIGN_BYTES == 0 or frame.data_bytes % ALIGN_BYTES
        whole = len(frame.head) + frame.data_bytes + len(frame.tail)
        assert whole == frame.size_bytes
        assert whole % ALIGN_BYTES == 0


def test_a_blob_that_is_cut_is_not_read():
    frame = frame_of(torch.float32, (8,))
    blob = frame.head + bytes(frame.data_bytes) + frame.tail
    with pytest.raises((RuntimeError, EOFError)):
        torch.load(io.BytesIO(blob[: len(blob) // 2]), weights_only=True)
