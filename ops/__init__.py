"""The operators, one file per family. Importing this package registers them all."""

from graphft.ops import (
    aten,
    clip,
    comm,
    compensate,
    data,
    eager,
    etcd,
    local,
    optimize,
    prim,
    random_state,
    serve,
    tasks,
    validate,
)

__all__ = [
    "aten",
    "clip",
    "comm",
    "compensate",
    "data",
    "eager",
    "etcd",
    "local",
    "optimize",
    "prim",
    "random_state",
    "serve",
    "tasks",
    "validate",
]
