"""The rules of a snapshot server, which decide without memory, sockets, files or clocks.

`slot_table` decides which slot is filled next, which snapshot is whole and which one is written.
`replicas` decides which snapshots are copied to other nodes, and which copies are kept here.
"""
