"""The data plane: buckets of bytes between trainers and shards, over ZeroMQ or simulated."""
