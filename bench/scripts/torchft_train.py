"""The model of in_place_train.py in torchft's loop, in the form of its README.

    torchft_train.py FOLDER TIMEOUT_S

Run it with an interpreter that has torchft, with TORCHFT_LIGHTHOUSE and torchrun's variables. Each
committed step is a line in FOLDER/PID.jsonl.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.ddp import PureDistributedDataParallel

BATCH, WIDTH, REPLICAS = 64, 256, 4


def main() -> None:
    folder, limit = Path(sys.argv[1]), timedelta(seconds=float(sys.argv[2]))
    layers = [torch.nn.Linear(WIDTH, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)]
    net = torch.nn.Sequential(*layers)
    inner = torch.optim.AdamW(net.parameters())

    def save() -> dict[str, object]:
        return {"net": net.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, dict[str, object]]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        timeout=limit,
        replica_id=f"replica_{os.environ['REPLICA_GROUP_ID']}",
    )
    model = PureDistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, inner)
    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end
    x, y = torch.randn(BATCH, WIDTH), torch.arange(BATCH) % 10
    while True:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() == before:
            continue
        place = {"world": manager.num_participants(), "round": manager._quorum_id}
        line = {"at_s": time.monotonic(), "step": before, "rank": 0, **place}
        log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
