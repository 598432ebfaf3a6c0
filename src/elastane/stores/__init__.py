"""Where a job's coordinator is found and elected: the Store protocol, stores, and the election."""
