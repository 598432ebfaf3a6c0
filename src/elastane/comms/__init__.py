"""Process groups that can change their world: their making, their end, and exact reductions."""
