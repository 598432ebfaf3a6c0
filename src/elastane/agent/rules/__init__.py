"""The decisions of one agent, as pure code: its contact to the coordinator, its departure, and its
local worker group.
"""
