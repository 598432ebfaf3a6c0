"""What a person sees of a job: one view model, and its faces."""
