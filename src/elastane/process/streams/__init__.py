"""Worker output: where it goes, the files it is kept in, and how the console shows it.

`plan` says what is asked for; `group` opens the streams of one start of a local worker group;
`tailer` shows files on the console through `console`, keeps the `index` that lets logs be merged
by time, and copies `filtered` lines. What a worker writes to a file never passes through the agent;
a stderr that would be neither in a file nor on a terminal does (`capture`, `pump`), so that what a
worker said last is known.
"""

from elastane.process.streams.console import Console, process_console
from elastane.process.streams.files import default_base_dir, last_lines
from elastane.process.streams.group import GroupStreams, WorkerStreams
from elastane.process.streams.places import ChooseFiles, GroupFiles, WorkerFiles
from elastane.process.streams.plan import (
    DEFAULT_PREFIX_TEMPLATE,
    PREFIX_TEMPLATE_ENV,
    LogPlan,
    StdMap,
    StreamChoice,
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
