"""The names of ``torch.distributed.elastic.multiprocessing.errors``, defined in `phalanx.errors`."""

from __future__ import annotations

from phalanx.errors import ChildFailedError, ErrorHandler, ProcessFailure, get_error_handler, record

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]
