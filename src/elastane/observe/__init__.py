"""How a job is observed: the event log and its readers, the console, worker output, and reports.

`records` defines one line of the event log, `events` writes and reads it, `logging` and `box` print
on stderr. `merge` reads worker output back by time, `story` reconstructs a job from its events,
`report` writes the outcome for programs, and `dashboard` displays a job as it runs.
"""
