"""The chunk queue on etcd: its transactions, the queues of sync and async trainers, claims that are stale."""
