"""One program of the bed: a process with a log, which ends with this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from pathlib import Path

_PR_SET_PDEATHSIG = 1
END_S = 10.0


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Part:
    """A program in a folder; its log is kept over restarts."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.log = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, argv: list[str]) -> None:
        assert not self.is_alive, f"{self.name} runs already"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ.get("PATH", ""), "HOME": str(self.folder)},
                preexec_fn=die_with_parent,  # noqa: PLW1509
            )

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def kill(self) -> None:
        """End it at once; its data are as a crash leaves them."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(END_S)

    def tail(self, lines_max: int = 30) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join([f"---- {self.name}", *text.splitlines()[-lines_max:]])
