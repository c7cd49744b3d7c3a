"""etcd's messages: python `etcd3` 0.12.0's, loaded with any protobuf from 4.21 to 7, and the plain values of `model`.

`etcd3`'s generated code builds descriptors one by one, which protobuf >= 4.21 refuses; a pin to an older protobuf would
hold back our users' other packages. The serialized file descriptors inside that code are good, though: they are read
from its source, put into a private pool (so that another `kv.proto` in the process does no harm), and the resulting
modules are registered under the names that `import etcd3` looks for.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from graphft.runtime.etcd.errors import EtcdError
from graphft.runtime.etcd.model import KV, Compare, Event, Op, RangeResult, TxnResult

PACKAGE = "etcd3.etcdrpc"
FILES = ("kv", "auth", "rpc")  # in the order of their imports


def _descriptor_of(source: Path) -> Any:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
            literal = ast.literal_eval(node.value.args[0])
            return descriptor_pb2.FileDescriptorProto.FromString(literal.encode("latin1"))
    raise EtcdError(f"{source} holds no serialized descriptor", rule="etcd-client", help="pip install etcd3==0.12.0")


def _message_class(pool: Any, descriptor: Any) -> Any:
    get = getattr(message_factory, "GetMessageClass", None)  # from protobuf 4.22 on
    return get(descriptor) if get else message_factory.MessageFactory(pool).GetPrototype(descriptor)


def _module(pool: Any, name: str, file: Any) -> ModuleType:
    module = ModuleType(name)
    for message, descriptor in file.message_types_by_name.items():
        setattr(module, message, _message_class(pool, descriptor))
    for enum, descriptor in file.enum_types_by_name.items():
        setattr(module, enum, EnumTypeWrapper(descriptor))
    return module


def load() -> ModuleType:
    """The module `etcd3.etcdrpc`: etcd's messages and gRPC stubs. Loads it on the first call."""
    if PACKAGE not in sys.modules:
        spec = importlib.util.find_spec("etcd3")
        if spec is None or not spec.submodule_search_locations:
            raise EtcdError("the package etcd3 is not installed", rule="etcd-client", help="pip install etcd3==0.12.0")
        folder = Path(spec.submodule_search_locations[0], "etcdrpc")
        pool = descriptor_pool.DescriptorPool()
        for name in FILES:
            proto = _descriptor_of(folder / f"{name}_pb2.py")
            pool.AddSerializedFile(proto.SerializeToString())
            full = f"{PACKAGE}.{name}_pb2"
            sys.modules[full] = _module(pool, full, pool.FindFileByName(proto.name))
    return importlib.import_module(PACKAGE)


etcdrpc = load()
TARGETS = {
    "create": ("CREATE", "create_revision"),
    "mod": ("MOD", "mod_revision"),
    "version": ("VERSION", "version"),
    "lease": ("LEASE", "lease"),
    "value": ("VALUE", "value"),
}
OPERATORS = {"=": "EQUAL", "!=": "NOT_EQUAL", "<": "LESS", ">": "GREATER"}


def prefix_span(prefix: str) -> dict[str, bytes]:
    """`key` and `range_end` of all keys that start with `prefix`; of all keys when it is empty."""
    start = prefix.encode()
    head = start.rstrip(b"\xff")
    end = head[:-1] + bytes([head[-1] + 1]) if head else b"\0"
    return {"key": start or b"\0", "range_end": end}


def kv_of(message: Any) -> KV:
    return KV(
        message.key.decode(),
        message.value,
        message.create_revision,
        message.mod_revision,
        message.version,
        message.lease,
    )


def range_of(message: Any, revision: int) -> RangeResult:
    return RangeResult(tuple(kv_of(kv) for kv in message.kvs), revision, message.more)


def event_of(message: Any) -> Event:
    return Event("delete" if message.type == 1 else "put", kv_of(message.kv))


def range_request(prefix: str, limit: int, keys_only: bool, count_only: bool = False) -> Any:
    return etcdrpc.RangeRequest(**prefix_span(prefix), limit=limit, keys_only=keys_only, count_only=count_only)


def txn_request(compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]) -> Any:
    return etcdrpc.TxnRequest(
        compare=[_compare(c) for c in compare], success=[_op(op) for op in success], failure=[_op(op) for op in failure]
    )


def txn_result(message: Any) -> TxnResult:
    revision = message.header.revision
    return TxnResult(message.succeeded, revision, tuple(_response(r, revision) for r in message.responses))


def _compare(compare: Compare) -> Any:
    target, field = TARGETS[compare.target]
    message = etcdrpc.Compare(
        key=compare.key.encode(),
        target=etcdrpc.Compare.CompareTarget.Value(target),
        result=etcdrpc.Compare.CompareResult.Value(OPERATORS[compare.op]),
    )
    setattr(message, field, compare.operand)
    return message


def _op(op: Op) -> Any:
    if op.kind == "put":
        return etcdrpc.RequestOp(request_put=etcdrpc.PutRequest(key=op.key.encode(), value=op.value, lease=op.lease))
    if op.kind == "delete":
        return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=op.key.encode()))
    if op.kind == "delete-prefix":
        return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(**prefix_span(op.key)))
    if op.kind == "range":
        return etcdrpc.RequestOp(request_range=range_request(op.key, op.limit, op.keys_only))
    return etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=op.key.encode()))


def _response(message: Any, revision: int) -> RangeResult | int | None:
    kind = message.WhichOneof("response")
    if kind == "response_range":
        return range_of(message.response_range, revision)
    return message.response_delete_range.deleted if kind == "response_delete_range" else None


def describe(request: Any) -> str:
    """Describes a request in words, for errors. Values, which may be large or private, are left out."""
    if request is None:
        return "the request"
    size = f"{request.ByteSize()} bytes"
    if isinstance(request, etcdrpc.TxnRequest):
        keys = [getattr(op, op.WhichOneof("request")).key.decode(errors="replace") for op in request.success]
        first = f", the first on {keys[0]}" if keys else ""
        return f"a transaction of {len(keys)} operations{first} ({size})"
    if isinstance(request, (etcdrpc.PutRequest, etcdrpc.RangeRequest, etcdrpc.DeleteRangeRequest)):
        kind = {"PutRequest": "put", "RangeRequest": "read", "DeleteRangeRequest": "delete"}[type(request).__name__]
        return f"a {kind} of {request.key.decode(errors='replace')} ({size})"
    return f"a {type(request).__name__} ({size})"
