"""Turns on the check of users and passwords in an etcd that has none yet."""

from __future__ import annotations

import asyncio

from phalanx._store.etcd import api, loop_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ROOT = "root"
"""The user, and its role, that etcd wants to be there before it checks passwords. It may do everything."""


def enable(target: str, password: str, seconds: float) -> None:
    """Have an etcd check passwords from now on, and give the user `ROOT` one. Waits at most about ``seconds``.

    Args:
        target: Where the etcd listens, as grpc writes it: ``127.0.0.1:2379``, ``unix:/run/etcd``.
        password: At most 72 bytes: bcrypt heeds no more.
        seconds: For all requests together.

    Raises:
        OSError: The etcd does not answer, or refuses. The message says what it said.
    """
    loop = loop_thread.acquire()
    try:
        asyncio.run_coroutine_threadsafe(_enable(target, password, seconds), loop).result()
    except api.aio.AioRpcError as error:
        msg = f"etcd does not begin to check passwords: {error.details() or error.code().name.lower()}"
        raise OSError(msg) from None
    except TimeoutError:
        msg = f"etcd has not begun to check passwords in {seconds:g} s"
        raise OSError(msg) from None
    finally:
        loop_thread.release(1.0)


async def _enable(target: str, password: str, seconds: float) -> None:
    requests: tuple[tuple[api.Method, dict[str, Any]], ...] = (
        (api.USER_ADD, {"name": ROOT, "password": password}),
        (api.ROLE_ADD, {"name": ROOT}),
        (api.GRANT_ROLE, {"user": ROOT, "role": ROOT}),
        (api.AUTH_ENABLE, {}),
    )
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    async with asyncio.timeout(seconds), api.aio.insecure_channel(target, options=options) as channel:
        for method, fields in requests:
            request = api.messages[method.request](**fields)
            await api.unary(channel, method)(request, timeout=seconds, wait_for_ready=True)
