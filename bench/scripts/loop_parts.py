"""What the scripts of the frameworks' loops share: a small classifier of texts, and its record.

The record has a line for each step of the optimizer, in FOLDER/PID.jsonl. The number of the step is
the one that AdamW keeps beside its moments, so a step that is done twice shows, whatever the loop
counts.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

BATCH, PER_WORKER = 64, 16
SAMPLES, WORDS, LENGTH, CLASSES = 400_000, 500, 24, 4
LOG_EVERY, SAVE_EVERY = 10, 50
LEARNING_RATE = 1e-3


class Texts(torch.utils.data.Dataset):
    """Texts of random words; the label is a function of the words."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words.sum() % CLASSES}


class Classifier(nn.Module):
    """An embedding, two encoder layers and a linear layer; 0.1 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(64, CLASSES)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = self.last(self.encoder(self.embedding(input_ids)).mean(1))
        return nn.functional.cross_entropy(found, labels)


def tiny_bert() -> nn.Module:
    """Return BERT with two small layers, as Transformers makes it."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
        )
    )


def record_steps(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Write a line after each step of this optimizer."""
    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end

    def write(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        state = [optimizer.state[each] for each in parameters if each in optimizer.state]
        moments = [each[name] for each in state for name in ("exp_avg", "exp_avg_sq")]
        data = (each.detach().numpy().tobytes() for each in (*parameters, *moments))
        line = {
            "step": int(state[0]["step"]),
            "world": dist.get_world_size(),
            "rank": dist.get_rank(),
            "round": 0,
            "digest": hashlib.sha1(b"".join(data)).hexdigest(),
            "at_s": time.monotonic(),
        }
        log.write(json.dumps(line) + "\n")

    optimizer.register_step_post_hook(write)
