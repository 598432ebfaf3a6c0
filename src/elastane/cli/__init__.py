"""The `elastane` command: one file a verb, found through the table in `cli.main`."""
