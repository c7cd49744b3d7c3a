"""The language: programs of variables and blocks of operators, their text, their definitions and their verifier.

In the order of reading: `types`, `program`, `registry` (what an op is), `printer` and `parser` (a program as text),
`dependence`, `graph`, `verify`, `literals` and `symbolic` (torch's literals and sizes), `storage` (a program on disk).
"""

from graphft.ir.program import Block, Operator, Program, Variable
from graphft.ir.types import GRAD, Arg, Dim, Kind, Ref, Sym, Type, backup_name, grad_name, map_refs, refs, same

__all__ = [
    "GRAD",
    "Arg",
    "Block",
    "Dim",
    "Kind",
    "Operator",
    "Program",
    "Ref",
    "Sym",
    "Type",
    "Variable",
    "backup_name",
    "grad_name",
    "map_refs",
    "refs",
    "same",
]
