"""The API of torch.distributed.elastic, module for module: a thin face over our parts."""
