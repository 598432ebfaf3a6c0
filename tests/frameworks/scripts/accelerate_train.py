"""An Accelerate script: prepare, gather, save_state; resumes, and dies once."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, TensorDataset

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def main():
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == DistributedType.MULTI_CPU, accelerator.distributed_type
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    data = TensorDataset(x, x @ torch.tensor([[1.0], [2.0], [3.0]]))
    model = torch.nn.Linear(3, 1)
    parts = (model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8))
    model, optimizer, loader = accelerator.prepare(*parts)
    state, mark = folder / "state", folder / "epoch"
    first = 0
    if mark.exists():
        accelerator.load_state(state)
        first = int(mark.read_text())
    for epoch in range(first, epochs):
        losses = []
        for index, (inputs, targets) in enumerate(loader):
            if restarts == 0 and epoch == 2 and index == 1 and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        accelerator.save_state(state)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            mark.with_suffix(".part").write_text(str(epoch + 1))
            mark.with_suffix(".part").rename(mark)
            with (folder / "story").open("a") as file:
                line = {"what": "epoch", "epoch": epoch, "loss": sum(losses) / len(losses),
                        "world": accelerator.num_processes, "restarts": restarts}  # fmt: skip
                file.write(json.dumps(line) + "\n")
    if accelerator.is_main_process:
        with (folder / "story").open("a") as file:
            file.write(json.dumps({"what": "done", "restarts": restarts}) + "\n")


main()
