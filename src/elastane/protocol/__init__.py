"""The protocol between agents and coordinator, and the types of a job. Pure: nothing here does I/O.

`model` has the nouns, `messages` the messages, `wire` their frames and the handshake. `events` and
`effects` are what shells and rules exchange, `limits` has every bound. `diagnosis` finds the cause
of failures, `hangs` judges progress, `sharding` counts replicas, and `checkpoints` says what a
checkpoint is.
"""
