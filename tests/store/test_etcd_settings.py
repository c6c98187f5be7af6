"""When a certificate has expired."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from phalanx._store.etcd.settings import expired

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("days", ["1", "20000"])  # the latter has a GeneralizedTime: from 2050 on, see RFC 5280
def test_a_certificate(tmp_path: Path, days: str) -> None:
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
             "/CN=a", "-keyout", "key", "-out", "cert", "-days", days]  # fmt: skip
    subprocess.run(words, check=True, cwd=tmp_path, capture_output=True)
    pem = (tmp_path / "cert").read_bytes()
    asked = ["openssl", "x509", "-in", "cert", "-noout", "-enddate", "-dateopt", "iso_8601"]
    said = subprocess.run(asked, check=True, cwd=tmp_path, capture_output=True, text=True).stdout
    until = said.strip().removeprefix("notAfter=").removesuffix("Z")
    assert expired(pem) == ""
    assert expired(pem, datetime(2200, 1, 1, tzinfo=UTC)) == f"{until} UTC"
    assert expired(b"text before\n" + pem + pem, datetime(2200, 1, 1, tzinfo=UTC)) == f"{until} UTC"


@pytest.mark.parametrize("text", [b"", b"\xff", b"-----BEGIN CERTIFICATE-----", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_what_is_none(text: bytes) -> None:
    assert expired(text) == ""
