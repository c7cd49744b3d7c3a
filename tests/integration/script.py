"""A user's script: describes a job and runs it. Arguments: the file that paces it, or "", then options as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import training  # beside this file

pace = Path(sys.argv[1]) if sys.argv[1] else None
job = training.job(training.program(), pace=pace, **json.loads(sys.argv[2] if sys.argv[2:] else "{}"))

if __name__ == "__main__":
    result = job.run()
    print(f"losses: {len(result.metrics.get('loss', ()))}")  # none where shard 0 is on another machine
