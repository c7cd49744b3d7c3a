"""A script hears of its run while it waits for it: `callbacks=` of a Trainer and of `job.run`."""
