"""A loop that logs scalars: in the body of each step, and between steps after every tenth.

Arguments: the folder of the sinks, steps, and the services to log to as well. The last step begins
once a file "enough" is in the folder.
"""

import os
import sys
import time
from pathlib import Path

import torch
import uncompiled
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elastane

assert uncompiled
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
services = {
    "wandb": lambda: elastane.WandB(folder / "wandb", project="digits", mode="offline"),
    "mlflow": lambda: elastane.MLflow(f"file://{folder}/mlflow", experiment="digits"),
    "trackio": lambda: elastane.Trackio(folder / "trackio", project="digits"),
}
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 4), torch.randn(512, 1))
with elastane.init() as job:
    net = nn.Linear(4, 1)
    model = DistributedDataParallel(net, process_group=job.process_group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    job.track(net=net, optimizer=optimizer)
    job.log_to(folder / "scalars.jsonl", elastane.TensorBoard(folder / "board"))
    job.log_to(*[services[name]() for name in sys.argv[3:]])
    batches = elastane.ElasticBatchSampler(len(data), 16)
    for step, _ in job.steps(DataLoader(data, batch_sampler=batches), until_step=steps):
        with step:
            while step.number == steps - 1 and not (folder / "enough").exists():
                time.sleep(0.01)
            for inputs, wanted in step.batches:
                step.backward(nn.functional.mse_loss(model(inputs), wanted))
            total = torch.tensor(1.0)
            torch.distributed.all_reduce(total, group=job.process_group)
            job.log(weight=net.weight.sum(), members=total)
            optimizer.step()
            optimizer.zero_grad()
        if step.committed and job.committed % 10 == 0:
            job.log(tenth=job.committed)
        (folder / f"up.{job.rank}.{os.getpid()}").write_text(str(job.committed))
        time.sleep(0.01)
    job.log(final=job.committed)
