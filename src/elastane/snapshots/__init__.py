"""The process of a node that owns the memory of snapshots and writes them to storage."""
