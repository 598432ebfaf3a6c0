"""Training scripts that ship with elastane; each is run by path and imports nothing of it."""
