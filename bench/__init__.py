"""Elastane and torchrun compared on one machine; `python -m bench.table` measures everything."""
