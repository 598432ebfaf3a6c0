"""Worker output: its destination, the files that hold it, and its display on the console.

`plan` parses the options. `group` opens the streams of one start of a local worker group. `tailer`
displays files on `console`, copies lines that match a filter, and keeps the time index by which
logs are merged. A file that a worker writes never passes through the agent. A stderr that would
reach neither a file nor a terminal does (`capture`), so that a worker's last lines are known.
"""

from elastane.process.streams.console import Console, process_console
from elastane.process.streams.files import default_base_dir, last_lines
from elastane.process.streams.group import GroupStreams, WorkerStreams
from elastane.process.streams.plan import (
    DEFAULT_PREFIX_TEMPLATE,
    PREFIX_TEMPLATE_ENV,
    ChooseFiles,
    GroupFiles,
    LogPlan,
    StdMap,
    StreamChoice,
    WorkerFiles,
    WorkerPlace,
    parse_needles,
    parse_ranks,
    parse_std_map,
    prefix_template,
)

__all__ = [
    "DEFAULT_PREFIX_TEMPLATE",
    "PREFIX_TEMPLATE_ENV",
    "ChooseFiles",
    "Console",
    "GroupFiles",
    "GroupStreams",
    "LogPlan",
    "StdMap",
    "StreamChoice",
    "WorkerFiles",
    "WorkerPlace",
    "WorkerStreams",
    "default_base_dir",
    "last_lines",
    "parse_needles",
    "parse_ranks",
    "parse_std_map",
    "prefix_template",
    "process_console",
]
