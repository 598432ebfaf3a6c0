"""The protocol between agents and coordinator, and the types of a job. Pure: nothing here does I/O.

`model` has the types of a job, `messages` the messages, `wire` their frames and the handshake.
Shells deliver `events` to rules, and rules return `effects`. `log_events` has the kinds of logged
events, `limits` the bounds that several rooms share, and `checkpoints` the records of a checkpoint.

Four modules judge a job from reports: `diagnosis` finds the cause of failures, `hangs` finds
workers without progress, and `stragglers` finds slow ranks. `culprits` finds the worker for which
the others wait, from each worker's `ring` of collectives.
"""
