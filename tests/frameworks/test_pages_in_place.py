"""The whole scripts of docs/accelerate.md and docs/trainer.md, whose workers are killed.

Replicas are equal after each step, each sample is used once in each epoch, and the weights are
those of an undisturbed loop in one process that is dealt the same samples in the same order.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from elastane.testing import LocalCluster

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
FRAMEWORKS = Path(__file__).parent
SAMPLES, STEPS_OF_EPOCH, EPOCHS, BATCH = 4096, 64, 2, 64
# One of them in the forward pass, one after its update, one in the last step of an epoch.
LOSSES = "10:forward:1 25:update:0 40:last:1"
DEADLINE_S = 240.0
# Rounding: measured after 193 steps 2e-7 (Accelerate) and 6e-7 (Trainer).
TOLERANCE = 1e-5


class PageJob:
    """A job of a page's script by the page's command, which has run to its end."""

    def __init__(self, folder: Path, page: str, preload: str) -> None:
        text = (FRAMEWORKS.parents[1] / "docs" / page).read_text("utf-8")
        [script] = re.findall(r"```python\n# train.py\n(.*?)```", text, re.DOTALL)
        script, shorter = re.subn(r"(epochs\(|num_train_epochs=)10\b", rf"\g<1>{EPOCHS}", script)
        assert shorter == 1
        [options] = re.findall(
            r"^elastane run --standalone (.*?) --rdzv-id run7 train.py$",
            text.replace("\\\n   ", ""), re.DOTALL | re.MULTILINE,
        )  # fmt: skip
        assert options.split() == [
            *("--nproc-per-node", "2", "--min-workers", "1", "--max-restarts", "20"),
            *("--in-place", "--ranks-may-change"),
        ]
        (folder / "train.py").write_text(f"import recorded_page\n{script}")
        (folder / "said").mkdir()
        env = {"RECORD": str(folder / "said"), "LOSSES": LOSSES}
        env["PYTHONPATH"] = str(FRAMEWORKS / "scripts")
        self.cluster = LocalCluster(
            [str(folder / "train.py")], folder=folder / "c", env=env, nnodes="1", nproc_per_node=2,
            min_workers=1, max_restarts=20, in_place=True, ranks_may_change=True, preload=preload,
        )  # fmt: skip
        with self.cluster as cluster:
            node = cluster.start("a")
            cluster.wait(lambda: not node.is_alive, "the agent ends", DEADLINE_S)
            assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
            assert not cluster.events("restart"), cluster.story()
            assert len(cluster.events("replacement")) == len(LOSSES.split()), cluster.story()
        self.output = node.output
        self._read(folder / "said")

    def _read(self, folder: Path) -> None:
        numbers = {x: n for n, x in enumerate(torch.linspace(-3, 3, SAMPLES).tolist())}
        # By step: the samples that contributed, the weights of each worker, the learning rate.
        self.used: dict[int, list[int]] = defaultdict(list)
        self.weights: dict[int, list[list[float]]] = defaultdict(list)
        self.rates: dict[int, float] = {}
        self.worlds: set[int] = set()
        for path in folder.glob("*.jsonl"):
            dealt: list[int] = []
            for line in map(json.loads, path.read_text().splitlines()):
                if "begun" in line:
                    begun = line["begun"]
                elif "inputs" in line:
                    dealt += [numbers[x] for x in line["inputs"]]
                else:
                    if line["made"] == 1:
                        self.begun = begun
                    self.used[line["made"]] += dealt
                    self.weights[line["made"]].append(line["weights"])
                    self.rates[line["made"]] = line["rate"]
                    self.worlds.add(line["world"])
                    dealt = []

    def undisturbed(self, weight_decay: float) -> torch.Tensor:
        """The weights of a loop in one process with these samples in each step, and these rates."""
        net = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        torch.nn.utils.vector_to_parameters(torch.tensor(self.begun), net.parameters())
        optimizer = torch.optim.AdamW(net.parameters(), weight_decay=weight_decay)
        data = torch.linspace(-3, 3, SAMPLES).unsqueeze(1)
        for step in sorted(self.used):
            optimizer.param_groups[0]["lr"] = self.rates[step]
            inputs = data[self.used[step]]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(inputs), torch.sin(inputs)).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        return torch.nn.utils.parameters_to_vector(net.parameters()).detach()

    def is_right(self, weight_decay: float) -> None:
        """The replicas, the samples and the weights are as they have to be."""
        steps = sorted(self.used)
        assert steps == [*range(1, steps[-1] + 1)]
        # The samples of the worker lost in an epoch's last step have one of their own.
        assert steps[-1] == EPOCHS * STEPS_OF_EPOCH + 1
        assert self.worlds == {1, 2}
        for step in steps:
            assert all(each == self.weights[step][0] for each in self.weights[step]), step
        dealt = Counter(sample for step in steps for sample in self.used[step])
        assert dealt == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
        # Of the steps in which a worker is lost before it has contributed, two have half a batch.
        assert [len(self.used[step]) for step in steps].count(BATCH // 2) >= 2
        there = torch.tensor(self.weights[steps[-1]][0])
        alone = self.undisturbed(weight_decay)
        assert (there - alone).norm() <= TOLERANCE * alone.norm()


def test_the_script_of_the_page_on_accelerate_has_the_weights_of_an_undisturbed_loop(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where the script saves
    job = PageJob(tmp_path, "accelerate.md", "torch._dynamo,accelerate")
    job.is_right(weight_decay=0.01)
    assert re.findall(r"^epoch (\d+): loss", job.output, re.MULTILINE) == ["0", "1"]


def test_the_script_of_the_page_on_the_trainer_has_the_weights_of_an_undisturbed_loop(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    preload = "torch._dynamo,transformers.trainer"
    job = PageJob(tmp_path, "trainer.md", preload)
    job.is_right(weight_decay=0.0)
    logged = job.output.count("{'loss'")
    assert logged == EPOCHS * STEPS_OF_EPOCH // 20, "the losses of each twentieth step"
