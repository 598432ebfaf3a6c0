"""What a job says about itself: the event log, the console, the merged view of worker output."""
