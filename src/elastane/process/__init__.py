"""Processes and what connects them: how elastane starts, watches, bounds and ends them.

The room holds the spawners (a fresh program or a fork of the zygote), the orphan reaper, the
control socket and the status page between agent and worker, worker output (`streams`), and sessions
over TCP (`rpc`). Beside them are the small things that processes of one machine share: private
files, the error file, timers, CPU placement and health checks.
"""
