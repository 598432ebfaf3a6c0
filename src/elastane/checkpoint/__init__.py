"""The worker's side of checkpoints: what is saved, when, and how it is restored.

`checkpointer.Checkpointer` is the user's object. A save captures the state (`capture`), lays it out
(`layout`, `shares`), copies it into the snapshot server's memory (`copying`) and says what to write
(`saving`, `plan`). A restore chooses a state on all ranks (`inventory`) and reads it (`restoring`,
`reading`). `simple` and `export` are for single processes.
"""
