"""Going back, for a process that is no shard: the change that raises the job's generation."""

from __future__ import annotations

import msgspec

from graphft.errors import plain_text
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Generation, decode_committed, decode_generation
from graphft.runtime.etcd.model import KV
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Change


def go_back(keys: Keys, current_kv: KV | None, committed_kv: KV | None, reason: str) -> Change:
    """The change that raises the generation, for processes that are no shard: all return to the newest checkpoint.

    It becomes part of the transaction that makes going back necessary. If the checkpoint is damaged, the shards find
    out when they read it.
    """
    current, committed = decode_generation(current_kv), decode_committed(committed_kv)
    assert current_kv is not None
    assert current is not None
    step, checkpoint = (committed.step, committed.checkpoint) if committed is not None else (0, "")
    raised = Generation(current.number + 1, step, checkpoint, plain_text(reason))
    return Change(
        "went-back",
        f"generation {raised.number} begins at step {step}: {reason}",
        (
            chunk_queue.Compare(keys.generation, "mod", current_kv.mod_revision),
            chunk_queue.Compare(keys.committed, "mod", committed_kv.mod_revision if committed_kv is not None else 0),
        ),
        (chunk_queue.Put(keys.generation, msgspec.json.encode(raised)),),
    )
