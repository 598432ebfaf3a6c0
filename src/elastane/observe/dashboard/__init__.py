"""The display of a running job: one view model (`view`), drawn in a terminal (`terminal`)."""
