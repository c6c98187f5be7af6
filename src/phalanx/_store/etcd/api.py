"""The messages and methods of etcd's API, version 3, that Phalanx calls.

The names and numbers are those of ``rpc.proto`` and ``kv.proto`` of etcd, see
https://etcd.io/docs/v3.5/dev-guide/api_reference_v3/. The messages are made from the text below when they are needed,
in a pool of their own: code that protoc had generated would ask for a protobuf of its own version, and could not be
loaded beside another client of etcd.

This module loads grpc and google.protobuf, and is the only one that does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from phalanx._store.store import Absent, Created, Put, Transaction

_SETTINGS = {
    "GRPC_VERBOSITY": "NONE",  # its lines would come between those of the workers
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # a fork of the launcher is none of a store's: see `EtcdStore`
}
"""What grpc reads in the environment when it is used first. It is as before then."""

_before = {name: os.environ.get(name) for name in _SETTINGS}
os.environ.update(_SETTINGS)
try:
    import grpc
    from grpc import aio

    grpc.insecure_channel("127.0.0.1:1").close()  # the first use: nothing is connected to
finally:
    for _name, _value in _before.items():
        if _value is None:
            os.environ.pop(_name, None)
        else:
            os.environ[_name] = _value

__all__ = ["aio", "grpc"]  # with all that is defined here

PACKAGE = "etcdserverpb"

MESSAGES = """
KeyValue: bytes key = 1; int64 create_revision = 2; int64 mod_revision = 3; bytes value = 5; int64 lease = 6
Event: int32 type = 1; KeyValue kv = 2
ResponseHeader: int64 revision = 3
RangeRequest: bytes key = 1; bytes range_end = 2; int64 limit = 3; int64 revision = 4
RangeResponse: ResponseHeader header = 1; repeated KeyValue kvs = 2; bool more = 3
PutRequest: bytes key = 1; bytes value = 2; int64 lease = 3
DeleteRangeRequest: bytes key = 1; bytes range_end = 2
RequestOp: PutRequest request_put = 2; DeleteRangeRequest request_delete_range = 3
Compare: int32 result = 1; int32 target = 2; bytes key = 3; \
oneof int64 create_revision = 5; oneof int64 mod_revision = 6
TxnRequest: repeated Compare compare = 1; repeated RequestOp success = 2
TxnResponse: ResponseHeader header = 1; bool succeeded = 2
WatchCreateRequest: bytes key = 1; bytes range_end = 2; int64 start_revision = 3; repeated int32 filters = 5
WatchRequest: WatchCreateRequest create_request = 1
WatchResponse: ResponseHeader header = 1; bool created = 3; bool canceled = 4; int64 compact_revision = 5; \
string cancel_reason = 6; repeated Event events = 11
LeaseGrantRequest: int64 TTL = 1; int64 ID = 2
LeaseGrantResponse: ResponseHeader header = 1; int64 ID = 2; int64 TTL = 3; string error = 4
LeaseRevokeRequest: int64 ID = 1
LeaseRevokeResponse: ResponseHeader header = 1
LeaseKeepAliveRequest: int64 ID = 1
LeaseKeepAliveResponse: ResponseHeader header = 1; int64 ID = 2; int64 TTL = 3
AuthenticateRequest: string name = 1; string password = 2
AuthenticateResponse: ResponseHeader header = 1; string token = 2
"""
"""A message a line: its fields, with their types and numbers. ``oneof``: of these, one is set, even if it is 0."""

DELETE = 1
"""The type of an event that tells of a key that was deleted."""
NO_PUT = 0
"""The filter of a watch that is told of deletions alone."""
EQUAL, CREATE, MOD = 0, 1, 2
"""A result and two targets of a comparison."""

_FIELD = re.compile(r"(?:(repeated|oneof) )?(\w+) (\w+) = (\d+)$")


def _build() -> dict[str, Any]:
    """Return the classes of the messages, by their names."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="phalanx/etcd.proto", package=PACKAGE, syntax="proto3")
    for line in MESSAGES.strip().splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for text in filter(None, fields.strip().split("; ")):
            found = _FIELD.match(text)
            assert found is not None, text
            how, kind, called, number = found.groups()
            label = field.LABEL_REPEATED if how == "repeated" else field.LABEL_OPTIONAL
            added = message.field.add(name=called, number=int(number), label=label)
            if how == "oneof":
                if not message.oneof_decl:
                    message.oneof_decl.add(name="one")
                added.oneof_index = 0
            if kind[0].isupper():
                added.type, added.type_name = field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
            else:
                added.type = getattr(field, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    found_in = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(found_in[name]) for name in found_in}


messages: dict[str, Any] = _build()
"""The classes of the messages, by their names."""


class Method(NamedTuple):
    """A method of a service: its path, and its messages."""

    path: str
    request: str
    response: str


RANGE = Method("/etcdserverpb.KV/Range", "RangeRequest", "RangeResponse")
TXN = Method("/etcdserverpb.KV/Txn", "TxnRequest", "TxnResponse")
WATCH = Method("/etcdserverpb.Watch/Watch", "WatchRequest", "WatchResponse")
GRANT = Method("/etcdserverpb.Lease/LeaseGrant", "LeaseGrantRequest", "LeaseGrantResponse")
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", "LeaseRevokeRequest", "LeaseRevokeResponse")
KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", "LeaseKeepAliveRequest", "LeaseKeepAliveResponse")
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", "AuthenticateRequest", "AuthenticateResponse")


def call(kind: Any, method: Method) -> Any:
    """Return what calls a method. ``kind``: the method of a channel for methods of its kind."""
    return kind(
        method.path,
        request_serializer=messages[method.request].SerializeToString,
        response_deserializer=messages[method.response].FromString,
    )


def end_of(prefix: bytes) -> bytes:
    r"""Return the first key that is greater than all that begin with a prefix: the end of their range.

    >>> end_of(b"/job/"), end_of(b"a\xff")
    (b'/job0', b'b')
    """
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def transaction_message(transaction: Transaction, prefix: bytes, leases: Mapping[str, int]) -> Any:
    """Return a transaction as etcd takes it.

    Args:
        transaction: Its keys are below the prefix.
        prefix: What they begin with in etcd.
        leases: The ids of the leases, by the names that writes have for them.
    """
    made = messages["TxnRequest"]()
    for condition in transaction.conditions:
        compare = made.compare.add(result=EQUAL, target=CREATE, key=prefix + condition.key.encode())
        if isinstance(condition, Absent):
            compare.create_revision = 0
        elif isinstance(condition, Created):
            compare.create_revision = condition.created
        else:
            compare.target, compare.mod_revision = MOD, condition.modified
    for write in transaction.writes:
        key = prefix + write.key.encode()
        if isinstance(write, Put):
            put = made.success.add().request_put
            put.key, put.value, put.lease = key, write.value, leases[write.lease]
        else:
            deleted = made.success.add().request_delete_range
            deleted.key = key
            if write.below:
                deleted.range_end = end_of(key)
    return made
