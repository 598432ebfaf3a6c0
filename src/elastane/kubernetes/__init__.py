"""Jobs on Kubernetes: the ElasticJob resource and its operator, and Kubernetes as a store.

`client` speaks to the API server, `store` keeps a job in it, `model` holds the types, `schema` the
resource's definition, `reconcile` decides and is pure, `operator` is its shell, `bridge` the side
channel between a job's coordinator and the operator, `manifests` the objects of an installation.
Nothing here imports torch.
"""
