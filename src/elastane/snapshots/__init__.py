"""The snapshot server: one process per node that owns the memory of snapshots.

Workers copy their state into its shared memory, and the copy survives them. The server writes
snapshots to storage and replicates them to other nodes. `SnapshotClient` is a worker's side,
`startup` starts a server, `server` is its process, `store.SnapshotStore` its state for one group of
workers, and `rules` decides.
"""
