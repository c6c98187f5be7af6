"""The store in an etcd: the extra ``etcd``. Nothing of it is loaded before a job of many machines needs it."""

INSTALL = "pip install grpcio protobuf"
"""How the libraries are installed, however Phalanx was: its extra can be named only where it was installed from."""
