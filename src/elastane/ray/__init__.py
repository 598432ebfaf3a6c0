"""Jobs on a Ray cluster: `elastane ray` places one agent on each Ray node that a job may have.

`rules` decides on which nodes agents start, and what follows from the end of one (pure). `host` is
the Ray actor that runs one agent, and `cluster` the connection to Ray. `job` is the program of
`ray job submit`: it serves the job's coordinator, so a job survives the loss of any node but the
one of this program.
"""
