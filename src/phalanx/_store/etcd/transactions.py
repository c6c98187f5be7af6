"""Makes the message for etcd of a transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx._store.etcd import api
from phalanx._store.store import Absent, Created, Put, Transaction


def message_of(transaction: Transaction, prefix: bytes, leases: Mapping[str, int]) -> Any:
    """Return a transaction as etcd takes it.

    Args:
        transaction: Its keys are below the prefix.
        prefix: What they begin with in etcd.
        leases: The ids of the leases, by the names that writes have for them.
    """
    made = api.messages["TxnRequest"]()
    for condition in transaction.conditions:
        compare = made.compare.add(result=api.EQUAL, target=api.CREATE, key=prefix + condition.key.encode())
        if isinstance(condition, Absent):
            compare.create_revision = 0
        elif isinstance(condition, Created):
            compare.create_revision = condition.created
        else:
            compare.target, compare.mod_revision = api.MOD, condition.modified
    for write in transaction.writes:
        key = prefix + write.key.encode()
        if isinstance(write, Put):
            put = made.success.add().request_put
            put.key, put.value, put.lease = key, write.value, leases[write.lease]
        else:
            deleted = made.success.add().request_delete_range
            deleted.key = key
            if write.below:
                deleted.range_end = api.end_of(key)
    return made
