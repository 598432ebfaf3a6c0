"""Elastane side by side with torchrun, on one machine; `python -m bench.table` runs all of it."""
