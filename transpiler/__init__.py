"""From one program to one program per role. Reading order: `api`, `job`, `passes`, `layout`, `rules`, `assemble`."""

from graphft.transpiler.api import transpile
from graphft.transpiler.assemble import assemble, shard_values
from graphft.transpiler.config import JobConfig
from graphft.transpiler.job import Job, pipeline
from graphft.transpiler.programs import Programs, Stage, run_passes

__all__ = ["Job", "JobConfig", "Programs", "Stage", "assemble", "pipeline", "run_passes", "shard_values", "transpile"]
