"""Training scripts that ship with elastane; each is run by path. digits.py uses only torch."""
