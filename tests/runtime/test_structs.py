"""Records are decoded by several threads of a process, from its first moment on."""

from __future__ import annotations

import subprocess
import sys

THREADS = """
import sys, threading, msgspec
from graphft.runtime.process.structs import prepare_structs
sys.setswitchinterval(1e-6)
for i in range(400):
    Inner = msgspec.defstruct("Inner", [("a", int), ("b", dict[str, int], msgspec.field(default_factory=dict))],
                              module="graphft.test")
    Outer = msgspec.defstruct("Outer", [("id", str), ("inner", Inner), ("some", list[Inner])], module="graphft.test")
    prepare_structs()
    together = threading.Barrier(3)
    def decode():
        together.wait()
        msgspec.json.decode(b'{"id":"x","inner":{"a":1},"some":[]}', type=Outer)
    threads = [threading.Thread(target=decode) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("fine")
"""


def test_threads_that_decode_a_struct_for_the_first_time() -> None:
    """Now and then a process ended with SIGSEGV when it started."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
