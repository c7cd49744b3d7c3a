"""etcd3's messages load with the protobuf that is installed, and stay out of others' way."""

from __future__ import annotations

import sys

import pytest
from google.protobuf import descriptor_pool

from graphft.runtime.etcd import messages


def test_messages_survive_the_wire() -> None:
    rpc = messages.etcdrpc
    request = rpc.TxnRequest(
        compare=[rpc.Compare(key=b"a", target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=7)],
        success=[rpc.RequestOp(request_put=rpc.PutRequest(key=b"a", value=b"\xff", lease=3))],
    )
    again = rpc.TxnRequest.FromString(request.SerializeToString())
    assert again == request
    assert again.success[0].request_put.value == b"\xff"


def test_the_package_finds_our_modules() -> None:
    import etcd3

    assert etcd3.etcdrpc is messages.etcdrpc is sys.modules["etcd3.etcdrpc"]
    assert messages.load() is messages.etcdrpc
    assert etcd3.etcdrpc.RangeRequest.DESCRIPTOR.file.pool is not descriptor_pool.Default()


def test_another_file_of_the_same_name_does_no_harm() -> None:
    for name in ("kv.proto", "rpc.proto", "auth.proto"):
        with pytest.raises(KeyError):
            descriptor_pool.Default().FindFileByName(name)
