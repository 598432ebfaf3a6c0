"""The settings that a process kubelet gets when it is started, and the form of an image."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Image:
    """A program of this machine in the place of an image."""

    entrypoint: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Setting:
    """One node. `switch_pid` names the network of its pods; without it, that is the machine's."""

    node: str
    number: int
    kubeconfig: str
    root: str
    certificate: tuple[str, str]
    switch_pid: int | None = None
    capacity: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    images: dict[str, Image] = field(default_factory=dict)
    # Paths of the machine that pods see where they are, also in /tmp, which is else their own.
    visible: list[str] = field(default_factory=list)
    # The socket of a process that has imported torch, whose forks are agents in pods; "" for none.
    fork_server: str = ""
    # The first wait before a second restart of a container; real kubelets wait 10 s.
    backoff_s: float = 0.5
    pull_backoff_s: float = 0.5

    def told(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def heard(cls, text: str) -> Setting:
        told = json.loads(text)
        told["images"] = {name: Image(**image) for name, image in told["images"].items()}
        told["certificate"] = tuple(told["certificate"])
        return cls(**told)

    @property
    def is_apart(self) -> bool:
        """Whether its pods have namespaces of their own."""
        return self.switch_pid is not None

    @property
    def folder(self) -> Path:
        return Path(self.root) / self.node
