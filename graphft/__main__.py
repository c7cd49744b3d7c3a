"""`python -m graphft`: the same as the `graphft` command."""

from __future__ import annotations

from graphft.runtime.cli import main

raise SystemExit(main())
