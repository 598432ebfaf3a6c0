"""Process groups whose world can change: their construction, their abort, and exact reductions.

`group` is the process group of one world, made by `construction`, which any thread may abort.
`elastic` is the group that a script sees: it stays the same object while worlds change beneath it.
`pairing` and `works` detect a lost peer and members that call different collectives. `mesh` holds
groups of replicas and shards. `state`, `state_plan` and `transfer` move training state from state
holders to other members, over `channel` or `near`. `mean` computes a mean that has the same
bits in every world.
"""
