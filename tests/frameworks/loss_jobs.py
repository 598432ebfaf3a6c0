"""Jobs of one node that run a script in place while its workers kill themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastane.testing import LocalCluster

SCRIPTS = Path(__file__).parent / "scripts"
# Of a whole job, with the imports of a framework in three workers.
DEADLINE_S = 240.0


class LossJob:
    """A script that has run to its end; `folder` is its first argument."""

    def __init__(
        self, make_folder: Callable[[str], Path], script: str, *words: str, **options: Any
    ) -> None:
        self.folder = make_folder("job")
        given = {"nnodes": "1", "min_workers": 1, "in_place": True, "max_restarts": 0, **options}
        command = [str(SCRIPTS / script), str(self.folder), *words]
        with LocalCluster(command, folder=make_folder("cluster"), **given) as cluster:
            node = cluster.start("a")
            cluster.wait(lambda: not node.is_alive, "the agent ends", DEADLINE_S)
            assert cluster.events("job-ended")[-1].data["ok"] is True, cluster.story()
            if given["max_restarts"] == 0:
                assert not cluster.events("restart"), cluster.story()
        self.output = node.output

    @property
    def said(self) -> Any:
        """What a worker has written to said.json."""
        return json.loads((self.folder / "said.json").read_text())
