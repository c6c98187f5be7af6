"""Until when a certificate is valid: TLS tells the side that has a certificate only that it is a bad one."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime

_VALIDITY = re.compile(rb"\x30[\x1e-\x22](?:\x17\x0d|\x18\x0f)\d{12,14}Z(\x17\x0d|\x18\x0f)(\d{12,14}Z)")
"""The two moments in a certificate, each a UTCTime (tag 0x17, two digits for the year) or a GeneralizedTime (0x18): RFC
5280, 4.1.2.5."""

_CENTURY = 50
"""Two digits from this on are years of the last century."""


def expired(pem: bytes, now: datetime | None = None) -> str:
    """Return when a certificate has expired, in words; "": it has not, or that is not to be read from it.

    Args:
        pem: The first certificate in this text is looked at.
        now: The present moment; None: that of the clock.
    """
    try:
        found = _VALIDITY.search(ssl.PEM_cert_to_DER_cert(_first(pem)))
        if found is None:
            return ""
        digits = found[2].decode()
        if found[1] == b"\x17\x0d":
            digits = ("20" if int(digits[:2]) < _CENTURY else "19") + digits
        until = datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return ""
    return f"{until:%Y-%m-%d %H:%M:%S} UTC" if until < (now or datetime.now(UTC)) else ""


def _first(pem: bytes) -> str:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    text = pem.decode("ascii", "replace")
    start = text.find(begin)
    return text[start : text.find(end, start) + len(end)] if start >= 0 else ""
