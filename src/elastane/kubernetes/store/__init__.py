"""Kubernetes as a store: a ConfigMap for each key, a Secret for a token, a Lease for each lease.

`settings` reads what the user wrote, `names` says which object is which key, `objects` is what is
read and written of them, `trouble` makes the store's errors of the API's, `store` and `lease` are
the store. A job needs no server of its own for it, only a Role for its pods.
"""
