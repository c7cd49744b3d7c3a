"""The operators, one file per family. Importing this package registers them all."""

from graphft.ops import aten, comm, data, eager, etcd, gradients, optimize, prim

__all__ = ["aten", "comm", "data", "eager", "etcd", "gradients", "optimize", "prim"]
