"""Which handler is made for which backend: those that are built in, those of other packages, and your own."""

from __future__ import annotations

from collections.abc import Callable

from phalanx._rendezvous.endpoint import BACKENDS, split_endpoint
from phalanx._rendezvous.settings import STATIC
from phalanx.rendezvous._handler import OneMachineRendezvous, RendezvousHandler, RendezvousParameters
from phalanx.rendezvous._many_machines import ManyMachinesRendezvous

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = ("phalanx.rendezvous", "torchrun.handlers")
"""The groups of entry points of other packages: ours, and torchrun's. The first that has a name counts."""

RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]
"""What makes a handler. One that has the methods, and is no `RendezvousHandler`, will do as well."""


class RendezvousHandlerRegistry:
    """Makes handlers by the names of their backends.

    >>> registry = RendezvousHandlerRegistry()
    >>> registry.register("alone", lambda params: OneMachineRendezvous(params.run_id, backend="alone"))
    >>> registry.create_handler(RendezvousParameters("alone", "", "run", 1, 1)).get_run_id()
    'run'
    """

    __module__ = "phalanx.rendezvous"

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Have ``creator`` make the handlers of a backend.

        Raises:
            ValueError: The name is empty; or another creator makes them already.
            TypeError: ``creator`` is not callable.
        """
        if not backend or not isinstance(backend, str):
            raise ValueError(f"backend: expected the name of a kind of rendezvous, got {backend!r}")
        if not hasattr(creator, "__call__"):  # noqa: B004 - `callable` would tell mypy that nothing follows
            raise TypeError(f"creator: expected a callable that takes RendezvousParameters, got {creator!r}")
        before = self._creators.setdefault(backend, creator)
        if before is not creator:
            raise ValueError(f"backend: {backend!r} is taken: {before!r} makes its handlers")

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Make a handler. It is used as it is: one of torch's will do.

        Raises:
            ValueError: Nobody makes those of ``params.backend``; or what is wrong with the parameters.
            RuntimeError: Its `get_backend` returns another name.
            Exception: What the creator raises.
        """
        creator = self._find(params.backend)
        if creator is None:
            known = ", ".join(map(repr, self._known()))
            msg = f"backend: there is no {params.backend!r}; {f'there are {known}' if known else 'none is registered'}"
            raise ValueError(msg)
        handler = creator(params)
        if handler.get_backend() != params.backend:
            msg = f"the handler that was made for the backend {params.backend!r} calls itself {handler.get_backend()!r}"
            raise RuntimeError(msg)
        return handler

    def _find(self, backend: str) -> RendezvousHandlerCreator | None:
        return self._creators.get(backend)

    def _known(self) -> list[str]:
        return list(self._creators)


class _Registry(RendezvousHandlerRegistry):
    """Knows the backends of other packages, too: an entry point is a function that returns the creator."""

    def _find(self, backend: str) -> RendezvousHandlerCreator | None:
        found = super()._find(backend)
        if found is None and (point := _points().get(backend)) is not None:
            found = point.load()()
            if not callable(found):
                msg = f"the entry point {backend!r} of {point.group}: expected a creator of handlers, got {found!r}"
                raise TypeError(msg)
        return found

    def _known(self) -> list[str]:
        return list(dict.fromkeys((*super()._known(), *_points())))


def _points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {point.name: point for group in reversed(ENTRY_POINTS) for point in entry_points(group=group)}


def _create(params: RendezvousParameters) -> RendezvousHandler:
    """Make a handler of a backend that is built in. On one machine, nothing is connected to."""
    if params.max_nodes == 1:
        host, port = split_endpoint(params.endpoint) if params.backend == STATIC else ("", 0)
        return OneMachineRendezvous(
            params.run_id, params.local_addr or host or "127.0.0.1", port, backend=params.backend
        )
    return ManyMachinesRendezvous(params)


rendezvous_handler_registry: RendezvousHandlerRegistry = _Registry()
"""The one that all use: it has the backends static, c10d, etcd, etcd-v2 and etcd-v3, and those of other packages."""

for _backend in BACKENDS:
    rendezvous_handler_registry.register(_backend, _create)
