"""Parameter servers: each holds one shard of what evolves."""
