"""What decides: pure functions and machines of (state, event, now)."""
