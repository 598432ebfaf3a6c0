"""Worker output: where it goes, the files it is kept in, and how the console shows it.

`plan` says what is asked for; `group` opens the streams of one start of a local worker group;
`tailer` shows files on the console through `console`, and keeps the `index` that lets logs be
merged by time. What a worker writes to a file never passes through the agent.
"""

from elastane.runtime.streams.console import Console, process_console
from elastane.runtime.streams.files import default_base_dir, last_lines
from elastane.runtime.streams.group import GroupStreams, WorkerStreams
from elastane.runtime.streams.plan import (
    DEFAULT_PREFIX_TEMPLATE,
    PREFIX_TEMPLATE_ENV,
    LogPlan,
    Std,
    StdMap,
    WorkerPlace,
    parse_ranks,
    parse_std_map,
    prefix_template,
)

__all__ = [
    "DEFAULT_PREFIX_TEMPLATE",
    "PREFIX_TEMPLATE_ENV",
    "Console",
    "GroupStreams",
    "LogPlan",
    "Std",
    "StdMap",
    "WorkerPlace",
    "WorkerStreams",
    "default_base_dir",
    "last_lines",
    "parse_ranks",
    "parse_std_map",
    "prefix_template",
    "process_console",
]
