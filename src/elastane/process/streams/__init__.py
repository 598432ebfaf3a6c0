"""Worker output: its destination, the files that hold it, and its display on the console.

`plan` parses the options. `group` opens the streams of one start of a local worker group. `tailer`
displays files on `console`, copies lines that match a filter, and keeps the time index by which
logs are merged. A file that a worker writes never passes through the agent. A stderr that would
reach neither a file nor a terminal does (`capture`), so that a worker's last lines are known.

Import from the modules: `group` needs asyncio, which a command that only reads logs does not load.
"""
