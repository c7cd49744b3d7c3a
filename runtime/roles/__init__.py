"""What a process of a job does: pserver, trainer, coordinator. Each runs the blocks of its program."""
