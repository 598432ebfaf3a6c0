"""A job whose workers write a line after each step, each process into its own file."""

from __future__ import annotations

from pathlib import Path

from growing import Growing

from elastane.testing import LocalCluster


class RecordedJob:
    """The records of a job's workers; a subclass starts the `cluster` with the folder's path."""

    cluster: LocalCluster

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "said"
        self.folder.mkdir()
        self._growing = Growing(self.folder)

    def said(self) -> dict[int, list[dict]]:
        """Return the records of each process."""
        return {int(pid): lines for pid, lines in self._growing.lines().items()}

    def wait_steps(self, pids: set[int], world: int, count: int = 3) -> None:
        """Wait until each of these processes has made `count` steps in a world of this size."""
        begun = {pid: len(self.said().get(pid, ())) for pid in pids}

        def there() -> bool:
            said = self.said()
            return all(
                len(said.get(pid, ())) >= begun[pid] + count and said[pid][-1]["world"] == world
                for pid in pids
            )

        self.cluster.wait(there, f"{count} steps of {sorted(pids)} in a world of {world}")
