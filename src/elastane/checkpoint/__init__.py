"""The worker's side of checkpoints: capture of the state, the times of saves, and restores.

`checkpointer.Checkpointer` is the user's object, `schedule` says when it saves. A save captures the
state (`capture`), lays it out (`layout`), shares it out over the ranks (`plan`) and copies it into
the snapshot server's memory (`copying`); `saving` makes it. A restore chooses a state on all ranks
(`restoring`) and reads it (`reading`). `simple` is for single processes. A new kind of object or of
optimizer state is added in `registered`, a new kind of tensor in `capture`.
"""
