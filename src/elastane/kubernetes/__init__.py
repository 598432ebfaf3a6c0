"""Jobs on Kubernetes: the ElasticJob resource and its operator, and Kubernetes as a store.

`client` speaks to the API server, `store` keeps a job in it, `model` holds the types, `schema` the
resource's definition, `reconcile` decides and is pure, `operator` is its shell, `bridge` the
exchange with a job's coordinator, `manifests` the objects for an installation. Nothing here imports
torch.
"""
