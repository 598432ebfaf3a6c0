"""The ImageNet example on tiny images, under elastane run and torchrun, and its records."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from growing import Growing
from jobs import PRELOAD_COMPILER, PRELOAD_OPTIMIZER
from polling import look

from elastane.testing import LocalCluster
from elastane.testing.cluster import LocalNode

EXAMPLE = Path(__file__).parents[2] / "examples" / "imagenet"
ON_ITS_NODE = Path(__file__).parent / "scripts" / "imagenet_node.py"
PLAIN, CHECKPOINTS, IN_PLACE = "train_plain.py", "train_checkpoints.py", "train_in_place.py"
CLASSES, OF_EACH_CLASS, SIZE, WIDTH = 4, 15, 16, 4
BATCH, EPOCHS = 8, 4
SAMPLES = CLASSES * OF_EACH_CLASS
PER_EPOCH = -(-SAMPLES // BATCH)
STEPS = EPOCHS * PER_EPOCH
DEADLINE_S = 90.0
MARK = "TEST_IMAGENET_MARK"
PRELOAD_IMAGES = "torch.utils.data,PIL.Image"


class Training:
    """A script in its folder, and the records of its workers."""

    def __init__(self, script: str, data: Path, folder: Path, *, shared: bool = False) -> None:
        self.own, self.ledger, self._pace = folder, folder / "ledger", folder / "pace"
        self._told = Growing(self.ledger)
        self.checkpoint = str(folder / "shared") if shared else "checkpoints"
        self.words = [
            *(str(ON_ITS_NODE), str(EXAMPLE / script), str(data)),
            *("--image-size", str(SIZE), "--width", str(WIDTH), "--workers", "0"),
            *("--epochs", str(EPOCHS), "--batch-size", str(BATCH), "--lr", "0.02"),
            *("--checkpoint", self.checkpoint, "--every-steps", "1"),
            *("--ledger", str(self.ledger)),
        ]

    def to(self, step: int) -> None:
        """Let workers train up to a step, where they wait."""
        new = self._pace.with_suffix(".new")
        new.write_text(str(step))
        new.replace(self._pace)

    def to_the_end(self) -> None:
        """Let workers train to the end."""
        self._pace.unlink()

    def environment(self, node: str) -> dict[str, str]:
        """Return the variables that workers need."""
        return {"NODE_FOLDER": str(self.own / node), "PACE": str(self._pace)}

    def lines(self, what: str = "") -> list[dict]:
        """Return all records, or those of one kind, in the order of time."""
        found = [line for lines in self._told.lines().values() for line in lines]
        return sorted((x for x in found if what in ("", x["what"])), key=lambda x: x["time"])

    def worlds(self) -> dict[str, list[dict]]:
        """Return the records of each world, in the order of their first steps."""
        found: dict[str, list[dict]] = {}
        for line in self.lines("did"):
            found.setdefault(line["world"], []).append(line)
        return found

    def committed(self) -> dict[int, list[dict]]:
        """Return the records of each step in the world that made it last."""
        found: dict[int, list[dict]] = {}
        for done in self.worlds().values():
            first = min(line["step"] for line in done)
            found = {step: lines for step, lines in found.items() if step < first}
            for line in done:
                found.setdefault(line["step"], []).append(line)
        return found

    def committed_in_place(self) -> dict[int, list[dict]]:
        """Return the records of committed steps; assert that no step is committed twice."""
        worlds: dict[int, set[str]] = {}
        for line in self.lines("committed"):
            worlds.setdefault(line["step"], set()).add(line["world"])
        assert all(len(names) == 1 for names in worlds.values()), worlds
        did = self.lines("did")
        return {
            step: [x for x in did if x["step"] == step and x["world"] in names]
            for step, names in worlds.items()
        }

    def are_at(self, step: int, world_size: int = 2, *, since: int = 0) -> bool:
        """Whether a world of that size has come to a step, in lines after the first `since`."""
        ranks: dict[str, set[int]] = {}
        for line in self.lines("did")[since:]:
            if line["step"] == step:
                ranks.setdefault(line["world"], set()).add(line["rank"])
        return any(len(found) == world_size for found in ranks.values())

    def end(self) -> dict:
        """Return the final record of the last world's workers; assert that all are equal."""
        found = self.lines("ends")
        assert {line["step"] for line in found} == {STEPS}
        assert len({line["weights"] for line in found}) == 1, found
        return found[0]


def every_sample_once(committed: dict[int, list[dict]]) -> None:
    """Assert that each sample of each epoch is in one committed step, and each step is there."""
    seen: dict[int, Counter[int]] = {}
    for lines in committed.values():
        for line in lines:
            seen.setdefault(line["epoch"], Counter()).update(line["samples"])
    once = Counter(range(SAMPLES))
    assert sorted(committed) == [*range(1, STEPS + 1)]
    assert sorted(seen) == [*range(EPOCHS)]
    for epoch, counts in seen.items():
        assert counts == once, (epoch, counts - once, once - counts)


class Nodes(Training):
    """A training of nodes under elastane run, of one worker each."""

    def __init__(self, script: str, data: Path, folder: Path, nnodes: str = "2", **more: bool):
        super().__init__(script, data, folder, **more)
        # Only the script in place imports scripts/uncompiled.py.
        preload = PRELOAD_OPTIMIZER if script == IN_PLACE else PRELOAD_COMPILER
        options = {"nnodes": nnodes, "nproc_per_node": 1, "max_restarts": 9}
        options["preload"] = f"{preload},{PRELOAD_IMAGES}"
        self.cluster = LocalCluster(self.words, folder=folder / "c", tee="3", **options)

    def start(self, *names: str) -> list[LocalNode]:
        """Start nodes."""
        return [self.cluster.start(name, env=self.environment(name)) for name in names]

    def go(self, step: int, world_size: int = 2) -> None:
        """Let a world train to a step, and wait until all its workers are there."""
        since = len(self.lines("did"))
        self.to(step)
        what = f"step {step} in a world of {world_size}"
        self.cluster.wait(lambda: self.are_at(step, world_size, since=since), what, DEADLINE_S)

    def finish(self) -> None:
        """Let the nodes train to the end."""
        self.to_the_end()
        self.cluster.wait_done(DEADLINE_S)


class Torchrun(Training):
    """A training of two workers under torchrun, which leaves no process behind."""

    @contextmanager
    def run(self, *options: str) -> Iterator[None]:
        """Run it to its end, and assert that it succeeds."""
        mark, log = uuid.uuid4().hex, self.own / "torchrun.log"
        foreign = ("PET_", "ELASTANE_", "TORCHELASTIC_", "MASTER_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        env |= {"OMP_NUM_THREADS": "1", MARK: mark, **self.environment("a")}
        # Else restarted workers may find the addresses of those before them (torch 2.13).
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.1"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *options, *self.words],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            yield
            assert process.wait(DEADLINE_S) == 0
        except (AssertionError, subprocess.TimeoutExpired) as error:
            error.add_note(log.read_text()[-6000:])
            raise
        finally:
            process.kill()
            process.wait()
            end(mark)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition` holds."""
        end_s = time.monotonic() + DEADLINE_S
        while (pause_s := look(condition, 0.02)) is not None:
            assert time.monotonic() < end_s, f"not within {DEADLINE_S:g} s: {what}"
            time.sleep(pause_s)


def end(mark: str) -> None:
    """End the processes that carry a mark."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
