"""Load python `etcd3` 0.12.0's messages and stubs with any protobuf from 4.21 to 7.

Its generated code builds descriptors one by one, which protobuf >= 4.21 refuses; a pin to an older protobuf would hold
back our users' other packages. The serialized file descriptors inside that code are good, though: they are read
from its source, put into a private pool (so that another `kv.proto` in the process does no harm), and the resulting
modules are registered under the names that `import etcd3` looks for. They are older than learners (etcd 3.4): these
fields are added.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from graphft.runtime.etcd.errors import EtcdError

PACKAGE = "etcd3.etcdrpc"
FILES = ("kv", "auth", "rpc")  # in the order of their imports
LEARNER = "isLearner"
FIELDS = {"Member": 5, "MemberAddRequest": 2}
"""Messages that have it, with its number."""


def _descriptor_of(source: Path) -> Any:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
            literal = ast.literal_eval(node.value.args[0])
            return _with_learners(descriptor_pb2.FileDescriptorProto.FromString(literal.encode("latin1")))
    raise EtcdError(f"{source} holds no serialized descriptor", rule="etcd-client", help="pip install etcd3==0.12.0")


def _with_learners(proto: Any) -> Any:
    kind = descriptor_pb2.FieldDescriptorProto
    for message in proto.message_type:
        if message.name in FIELDS:
            message.field.add(name=LEARNER, number=FIELDS[message.name], type=kind.TYPE_BOOL, label=kind.LABEL_OPTIONAL)
    return proto


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
