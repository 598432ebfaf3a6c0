"""Where elastane meets other launchers and frameworks; each module imports what it is named for."""
