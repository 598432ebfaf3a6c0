"""Jobs on Kubernetes: the ElasticJob resource and the operator that keeps it.

`model` holds the types, `schema` the resource's definition, `reconcile` decides and is pure,
`operator` is the shell that sees and does. Nothing here imports torch.
"""
