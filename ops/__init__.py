"""The operators, one file per family. Importing this package registers them all."""

from graphft.ops import aten, prim

__all__ = ["aten", "prim"]
