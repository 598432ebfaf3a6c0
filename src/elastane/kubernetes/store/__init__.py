"""Kubernetes as a store: a ConfigMap for each key, a Secret for a token, a Lease for each lease.

`backend` offers it to `--rdzv-backend`, `settings` reads the command line, `objects` maps keys to
objects and their fields, `store` and `lease` are the store. A job needs no server of its own for
it, only a Role for its pods.
"""
