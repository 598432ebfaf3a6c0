"""A stand-in for MLflow whose store is a folder; a file `hang` or `refuse` in it is a fault."""
