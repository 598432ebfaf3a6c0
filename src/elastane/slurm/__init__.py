"""Jobs under Slurm: the environment that `srun` sets, and the batch script that asks for it.

`hostlist`, `step` and `script` are pure: node lists, the options that follow from a step's
environment, the text of the script. `secret` derives the token of a job from a file of the user.
Nothing here talks to Slurm's daemons. A contradictory environment fails with ConfigurationError.
"""
