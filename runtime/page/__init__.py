"""A page to look at: whether a job trains, when it will be done, and where its time went."""
