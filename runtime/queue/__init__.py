"""Hands out chunks, and follows what becomes of them.

Trainers use `SyncQueue` or `AsyncQueue` on a `ChunkQueue` (`chunk_queue.py`), which etcd or a coordinator keeps. Shards
use `passes.py`; launchers `transactions.fail_batch` and `task_client.report_failed`; loops of a user's own are
`task_loop.TaskLoop`. The decisions are in `protocol/chunk_queue.py` and `protocol/task_queue.py`."""
