"""What runs under faults have brought to light, each as the smallest case that shows it."""

from __future__ import annotations

import threading

from graphft.runtime.roles.trainer_sync import SlotTrainer
from graphft.runtime.transport import ZmqClient


def test_asking_a_trainer_to_leave_needs_no_lock_that_it_may_hold() -> None:
    """SIGTERM came while the main thread was sending: its handler waited for the lock that the thread held, and the
    trainer kept its slots, and the job, until its lease had ended."""
    trainer = SlotTrainer.__new__(SlotTrainer)
    trainer.transport, trainer.leaving = ZmqClient("t"), False

    def asked() -> None:
        with trainer.transport._lock:
            trainer._leave()

    thread = threading.Thread(target=asked, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert trainer.leaving
    trainer.transport.close()
