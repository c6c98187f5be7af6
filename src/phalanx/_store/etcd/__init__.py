"""The store in an etcd: the extra ``phalanx[etcd]``. Nothing of it is loaded before a job of many machines needs it."""
