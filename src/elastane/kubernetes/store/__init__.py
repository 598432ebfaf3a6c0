"""Kubernetes as a store: a ConfigMap for each key, a Secret for a token, a Lease for each lease.

`settings` reads the command line and holds the backend, `names` maps keys to objects, `objects` are
the fields that are read and written, `trouble` maps errors of the API to those of a store, `store`
and `lease` are the store. A job needs no server of its own for it, only a Role for its pods.
"""
