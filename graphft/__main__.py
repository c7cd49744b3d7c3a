"""The `graphft` command, and `python -m graphft`."""

from __future__ import annotations

import os
import sys

if "GRAPHFT_PATH" in os.environ:  # a child: it finds modules where its parent does
    sys.path[:] = os.environ.pop("GRAPHFT_PATH").split(os.pathsep)


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
