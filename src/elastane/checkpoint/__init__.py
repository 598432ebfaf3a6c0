"""The worker's side of checkpoints: what is saved, when, and how it comes back."""
