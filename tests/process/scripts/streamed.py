"""Training in place over shards; the trained weights are how often each sample was committed.

Each sample adds its own row to the gradient, so the model counts the committed samples exactly,
whatever happens to the workers. Lines as those of in_place.py go into FOLDER/PID.jsonl. KIND names
the source: lists of numbers, WebDataset's tar files, a Hugging Face IterableDataset, or a dataset
of LitData or MosaicML that is in FOLDER/KIND. A worker that finds FOLDER/PID.hang takes that file
and hangs while it reads its list. All stop after the epoch in which rank 0 finds FOLDER/enough.

    streamed.py FOLDER STEP_S KIND
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

SAMPLES, BATCH = 1009, 24
LENGTHS = [200, 0, 1, 333, 77, 24, 150, 5, 219]
assert sum(LENGTHS) == SAMPLES
FIRSTS = [sum(LENGTHS[:k]) for k in range(len(LENGTHS))]


def numbers(shard: int) -> range:
    return range(FIRSTS[shard], FIRSTS[shard] + LENGTHS[shard])


def source(kind: str, folder: Path):
    """The same samples from each kind of source."""
    from elastane.data import sources
    from elastane.data.sources import ShardSource

    if kind == "webdataset":
        return sources.webdataset(sorted(map(str, folder.glob("*.tar"))))
    if kind == "hugging_face":
        import datasets

        def rows(shards):
            for shard in shards:
                yield from ({"number": number} for number in numbers(shard))

        shards = {"shards": [*range(len(LENGTHS))]}
        dataset = datasets.IterableDataset.from_generator(rows, gen_kwargs=shards)
        return sources.hugging_face(dataset.shuffle(seed=5, buffer_size=20))

    def lists(shard: int, start: int, _epoch: int):
        for number in numbers(shard)[start:]:
            hang = folder / f"{os.getpid()}.hang"
            if hang.exists():
                hang.unlink()
                time.sleep(100_000)
            yield number

    return ShardSource(range(len(LENGTHS)), lists)


def loader_of(kind: str, folder: Path):
    """The loader of the job's steps."""
    import elastane

    if kind not in ("litdata", "mosaicml"):
        return elastane.ElasticStream(
            source(kind, folder), BATCH, seed=3, lanes=3, collate_fn=collate
        )
    from torch.utils.data import DataLoader

    from elastane.data import sources
    from elastane.data.shards import ElasticShards

    if kind == "litdata":
        from litdata import StreamingDataset

        known = sources.litdata(StreamingDataset(str(folder / kind)))
    else:
        from streaming import Stream

        stream = Stream(local=str(folder / "local"), remote=str(folder / kind))
        known = sources.mosaicml(stream)
    return DataLoader(
        ElasticShards(*known, BATCH, seed=3, lanes=3),
        batch_size=None,
        collate_fn=collate,
        num_workers=2,
    )


def collate(samples: list):
    if isinstance(samples[0], int):
        return samples
    return [int(each["number"] if "number" in each else each["txt"]) for each in samples]


def main() -> None:
    import torch
    import torch.distributed as dist
    import uncompiled  # noqa: F401 - before the optimizer is made

    import elastane

    folder, step_s, kind = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    folder = Path(folder)
    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end
    with elastane.init() as job:
        net = torch.nn.Linear(SAMPLES, 1, bias=False).to(torch.float64)
        torch.nn.init.zeros_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        job.track(net=net, optimizer=optimizer)
        saver = elastane.Checkpointer(folder / "checkpoints", every_steps=10)
        saver.restore(job)
        loader = loader_of(kind, folder)
        ends = []
        for step, samples in job.steps(loader, until_epoch=10**6):
            with step:
                total = torch.zeros(1, SAMPLES + 1, dtype=torch.float64)
                total[0, SAMPLES] = job.rank == 0 and (folder / "enough").exists()
                for number in samples if step.samples else ():
                    total[0, number] -= 1
                time.sleep(step_s)
                dist.all_reduce(total, group=job.process_group)
                net.weight.grad = total[:, :SAMPLES]
                optimizer.step()
                optimizer.zero_grad()
            if step.committed:
                ends += [step.number] if step.last_of_epoch else []
                line = {"what": "committed", "step": step.number, "rank": job.rank}
                log.write(json.dumps({**line, "world": job.world_size}) + "\n")
                saver.maybe_save(step)
                if step.last_of_epoch and total[0, SAMPLES]:
                    break
        saver.close()
        found = {"steps": job.committed, "counts": net.weight.flatten().tolist(), "ends": ends}
        (folder / f"{os.getpid()}.final").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
