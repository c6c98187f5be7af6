"""Pickles torch's tensors by copy, where the receiver needs memory of its own.

`torch.multiprocessing` shares their memory: by a descriptor or a file that the sender has to keep, and on a GPU by a
handle that is invalid once the sender has ended. That is right for arguments. A value that a worker returns outlives
the worker, so its tensors are copied; those that a function by value refers to are copied too, because a worker that
imports the function has its own. Memory that the program itself has shared stays shared. Loaded only where torch is.
"""

from __future__ import annotations

import ctypes
import pickle
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any


def copying_reducers(
    shared: Mapping[type, Any],
    *,
    keep_shared: Collection[int] = (),
    may_share: Callable[[], bool] = lambda: True,
    returns: bool = False,
) -> dict[type, Any]:
    """Reducers by type that copy tensors, in place of torch's, ``shared``, which still reduce what stays shared.

    That is memory whose id is in ``keep_shared``; and memory that is shared already, by a descriptor, if it
    ``may_share``. With ``returns``, the value goes back to the launcher: memory that came from there by a file's name
    goes back by it.
    """
    torch: Any = sys.modules["torch"]

    def storage(value: Any) -> Any:
        if id(value) in keep_shared or (_has_descriptor(value) and may_share()):
            return shared[torch.UntypedStorage](value)
        # An argument that is shared by a file's name: this process outlives the receiver's use.
        if not returns and value.device.type == "cpu" and value.is_shared():
            return shared[torch.UntypedStorage](value)
        if _from_launcher and returns and _strategy() == "file_system" and _is_the_launchers(value):
            return shared[torch.UntypedStorage](value)
        return _copy_storage(value)

    def tensor(value: Any) -> Any:
        return shared[type(value)](value) if id(value) in keep_shared else _reduce_tensor(value)

    return _reducers(tensor, storage)


_from_launcher: set[Any] = set()  # names of shared memory files


def note_received() -> None:
    """Record the files of shared memory that this process has so far: they came from the launcher."""
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is not None:
        _from_launcher.update(key for key in list(reductions.shared_cache) if isinstance(key, (str, bytes)))


def _is_the_launchers(storage: Any) -> bool:
    reductions: Any = sys.modules["torch.multiprocessing.reductions"]
    this = reductions.StorageWeakRef(storage)
    return any(reductions.shared_cache.get(name) == this for name in _from_launcher)


def noting_reducers(memory: dict[int, object]) -> dict[type, Any]:
    """Reducers by type that add the memory of tensors to ``memory``, by id, and pickle none of it."""

    def storage(value: object) -> Any:
        memory[id(value)] = value
        return bool, ()

    def tensor(value: Any) -> Any:  # one on a device is shared as a whole
        return _reduce_tensor(value) if value.device.type in ("cpu", "meta") else storage(value)

    return _reducers(tensor, storage)


def _reducers(tensor: Any, storage: Any) -> dict[type, Any]:
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is None:  # another thread is still importing torch
        return {}
    kinds = [kind for kind, reduce in _registered().items() if reduce is reductions.reduce_tensor]
    torch: Any = sys.modules["torch"]
    typed = {torch.TypedStorage: _registered()[torch.TypedStorage]}  # which leads to an untyped one
    return {**typed, torch.UntypedStorage: storage, **dict.fromkeys(kinds, tensor)}


def _registered() -> dict[type, Any]:
    return dict(sys.modules["multiprocessing.reduction"].ForkingPickler._extra_reducers)


def _has_descriptor(storage: Any) -> bool:
    """Whether it is in shared memory that is passed by a descriptor, to any number of receivers and for any time."""
    return bool(storage.device.type == "cpu" and storage.is_shared() and _strategy() == "file_descriptor")


def _strategy() -> str:
    return str(sys.modules["torch.multiprocessing"].get_sharing_strategy())


def _copy_storage(storage: Any) -> Any:
    """Reduce a storage to its bytes, as a buffer, which a pickler may keep out of the pickle."""
    size, device = storage.nbytes(), storage.device
    if device.type != "cpu":
        return _storage_on_device, (size, str(device), None if device.type == "meta" else storage.cpu())
    if not size:
        return type(storage), (size,)
    memory = (ctypes.c_char * size).from_address(storage.data_ptr())
    memory.owner = storage  # a temporary tensor may own it, and would be freed before its bytes are read
    return _make_storage, (pickle.PickleBuffer(memory),)


def _make_storage(buffer: Any) -> Any:
    """Make a storage that owns its memory, and so can be resized."""
    import torch  # no dependency of ours: the sender of a tensor has it

    view = memoryview(buffer).cast("B")
    storage = torch.UntypedStorage(view.nbytes)
    source = ctypes.addressof(ctypes.c_char.from_buffer(view)) if not view.readonly else bytes(view)
    ctypes.memmove(storage.data_ptr(), source, view.nbytes)
    return storage


def _storage_on_device(size: int, device: str, source: Any) -> Any:
    import torch  # as above

    storage = torch.UntypedStorage(size, device=device)
    return storage if source is None else storage.copy_(source)


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor as torch does if its storage is in memory, else by a copy in memory."""
    if tensor.is_leaf and (tensor.is_quantized or tensor.is_conj() or tensor.is_neg()):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # torch's reducer for sharing loses how the bytes are read
    reduce_tensor = sys.modules["torch.multiprocessing.reductions"].reduce_tensor
    if tensor.device.type in ("cpu", "meta") or (tensor.requires_grad and not tensor.is_leaf):  # it refuses the latter
        return reduce_tensor(tensor)
    return _to_device, (type(tensor), tensor.detach().cpu(), str(tensor.device), tensor.requires_grad)


def _to_device(kind: Any, tensor: Any, device: str, requires_grad: bool) -> Any:  # noqa: FBT001 - pickle calls it by position
    moved = tensor.to(device)
    if kind is not type(moved):
        return kind(moved, requires_grad=requires_grad)  # torch.nn.Parameter
    return moved.requires_grad_(requires_grad)
