"""How torch's tensors are pickled when the receiver is to have a copy of its own.

`torch.multiprocessing` has them shared: by a descriptor or a file that the sender has to keep, and on a GPU by a handle
that is worth nothing once the sender has gone. That is right for arguments. What a worker returns outlives it: it is
copied, and so is what a function by value refers to, as all that a worker imports is. But what somebody has put into
shared memory stays there. Loaded only where torch is.
"""

from __future__ import annotations

import ctypes
import pickle
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any


def by_value(
    shared: Mapping[type, Any],
    *,
    given: Collection[int] = (),
    may_share: Callable[[], bool] = lambda: True,
    returns: bool = False,
) -> dict[type, Any]:
    """Reducers by type, to go before those of torch, which are in ``shared`` and still reduce what stays shared.

    That is what is in ``given``, by id; and memory that has a descriptor because it is shared already, as long as
    ``may_share`` returns True. If a value ``returns``, what came from the launcher by a file's name goes back by it.
    """
    torch: Any = sys.modules["torch"]

    def storage(value: Any) -> Any:
        if id(value) in given or (_has_descriptor(value) and may_share()):
            return shared[torch.UntypedStorage](value)
        if not returns and value.device.type == "cpu" and value.is_shared():  # by a file's name; this process lives on
            return shared[torch.UntypedStorage](value)
        if _from_launcher and returns and _strategy() == "file_system" and _is_the_launchers(value):
            return shared[torch.UntypedStorage](value)
        return _copy_storage(value)

    def tensor(value: Any) -> Any:
        return shared[type(value)](value) if id(value) in given else _reduce_tensor(value)

    return _reducers(tensor, storage)


_from_launcher: set[Any] = set()  # the names of files of shared memory


def note_received() -> None:
    """All that is shared by a file's name as yet has come from the launcher, and can go back there by that name."""
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is not None:
        _from_launcher.update(key for key in list(reductions.shared_cache) if isinstance(key, (str, bytes)))


def _is_the_launchers(storage: Any) -> bool:
    reductions: Any = sys.modules["torch.multiprocessing.reductions"]
    this = reductions.StorageWeakRef(storage)
    return any(reductions.shared_cache.get(name) == this for name in _from_launcher)


def noted(given: dict[int, object]) -> dict[type, Any]:
    """Reducers by type that put the memory of tensors into ``given``, by id, and go no further."""

    def storage(value: object) -> Any:
        given[id(value)] = value
        return bool, ()

    def tensor(value: Any) -> Any:  # one on a device is shared as a whole
        return _reduce_tensor(value) if value.device.type in ("cpu", "meta") else storage(value)

    return _reducers(tensor, storage)


def _reducers(tensor: Any, storage: Any) -> dict[type, Any]:
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is None:  # torch is only just being imported, by another thread
        return {}
    kinds = [kind for kind, reduce in _registered().items() if reduce is reductions.reduce_tensor]
    torch: Any = sys.modules["torch"]
    typed = {torch.TypedStorage: _registered()[torch.TypedStorage]}  # which leads to an untyped one
    return {**typed, torch.UntypedStorage: storage, **dict.fromkeys(kinds, tensor)}


def _registered() -> dict[type, Any]:
    return dict(sys.modules["multiprocessing.reduction"].ForkingPickler._extra_reducers)


def _has_descriptor(storage: Any) -> bool:
    """Whether it is in shared memory that goes by a descriptor: as many may have it as like, as long as they like."""
    return bool(storage.device.type == "cpu" and storage.is_shared() and _strategy() == "file_descriptor")


def _strategy() -> str:
    return str(sys.modules["torch.multiprocessing"].get_sharing_strategy())


def _copy_storage(storage: Any) -> Any:
    """The bytes of a storage in memory; they stay out of the pickle where large buffers do."""
    size, device = storage.nbytes(), storage.device
    if device.type != "cpu":
        return _storage_on_device, (size, str(device), None if device.type == "meta" else storage.cpu())
    if not size:
        return type(storage), (size,)
    memory = (ctypes.c_char * size).from_address(storage.data_ptr())
    memory.owner = storage  # it may be of a tensor that was made to be pickled, and is gone before its bytes are read
    return _make_storage, (pickle.PickleBuffer(memory),)


def _make_storage(buffer: Any) -> Any:
    """A storage that owns its memory, and so can be resized."""
    import torch  # no dependency of ours: whoever sends a tensor has it

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
    """As torch reduces it, where its storage is in memory; else by way of a copy in memory."""
    if tensor.is_leaf and (tensor.is_quantized or tensor.is_conj() or tensor.is_neg()):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # torch's own for sharing loses what the bytes mean
    reduce_tensor = sys.modules["torch.multiprocessing.reductions"].reduce_tensor
    if tensor.device.type in ("cpu", "meta") or (tensor.requires_grad and not tensor.is_leaf):  # it refuses the latter
        return reduce_tensor(tensor)
    return _to_device, (type(tensor), tensor.detach().cpu(), str(tensor.device), tensor.requires_grad)


def _to_device(kind: Any, tensor: Any, device: str, requires_grad: bool) -> Any:  # noqa: FBT001 - pickle calls it by position
    moved = tensor.to(device)
    if kind is not type(moved):
        return kind(moved, requires_grad=requires_grad)  # torch.nn.Parameter
    return moved.requires_grad_(requires_grad)
