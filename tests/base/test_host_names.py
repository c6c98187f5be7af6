"""Names that are not known yet, and a DNS that does not answer."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from phalanx._base.host_names import await_name, look_up
from phalanx._base.threads import Latch

ADDRESS = socket.getaddrinfo("127.0.0.1", 1, type=socket.SOCK_STREAM)


def test_a_look_up_takes_no_longer_than_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, returned = threading.Event(), threading.Event()

    def dead(*_: Any, flags: int = 0, **__: Any) -> Any:
        if flags:
            raise socket.gaierror
        answers.wait(30)
        returned.set()
        return ADDRESS

    monkeypatch.setattr(socket, "getaddrinfo", dead)
    with pytest.raises(TimeoutError, match=r"its name was not resolved within 0\.01 s"):
        look_up("slow.invalid", 1, seconds=0.01)
    answers.set()
    assert returned.wait(30)


def test_a_name_that_is_published_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    said: list[str] = []

    def later(host: str, *_: Any, flags: int = 0, **__: Any) -> Any:
        asked.append(host)
        if flags or len(asked) < 4:  # a look-up of a name asks twice: whether it is an address, first
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ADDRESS

    monkeypatch.setattr(socket, "getaddrinfo", later)
    await_name("pod-0.train", 30.0, Latch(), lambda: said.append("waits"))
    assert (len(asked), said) == (4, ["waits"])


def test_the_wait_for_a_name_is_bounded_and_can_be_ended() -> None:
    over = Latch()
    with pytest.raises(socket.gaierror):
        await_name("no name", 30.0, over, over.open)
    with pytest.raises(socket.gaierror):
        await_name("no name", 0.1, Latch(), lambda: pytest.fail("it waits"))
