"""The `graphft` command, and `python -m graphft`."""

from __future__ import annotations

import os
import sys

if "GRAPHFT_PARENT" in os.environ and sys.path[:1] == [os.getcwd()]:  # a child, and its Python knows no -P
    del sys.path[0]


def main() -> int:
    """Returns the exit status. Ctrl-C is no traceback while the command is imported, either."""
    try:
        from graphft.runtime.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
