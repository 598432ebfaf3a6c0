"""The output of a job for people and programs: event log, console, and final report.

`events` defines, writes and reads the event log; `merge` merges the workers' own logs. `logging`
and `box` print to stderr, and `report` writes the final report. `story` collects the history of a
job from its events, `account` its goodput; `deposed` leaves out events that did not count. `view`
has all that is displayed of a job, with its `incidents`; `screen` draws it.

The command line reads all of them; the agent uses `events`, `logging`, `box` and `report`. Nothing
here decides anything about a job, and nothing here blocks its caller: a full disk or a stuck
console loses lines, and their count is logged.
"""
