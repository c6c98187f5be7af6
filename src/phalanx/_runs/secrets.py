"""What of command lines and environments is no secret. A page is mailed to people who were never meant to have any."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

HIDDEN = "(left out)"
"""What stands in place of a secret."""

_NAMES = re.compile(
    r"(?:^|[_.-])(?:\w*tokens?|\w*secrets?|\w*passw(?:or)?d|passphrase|pass|pwd|api_?keys?|\w*keys?|\w*credentials?|auth"
    r"|authorization|cookies?|dsn|sas|session|signature|private|bearer|salt)(?:$|[_.-])",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(r"(?P<name>-{0,2}[\w.-]+)=(?P<value>.*)", re.DOTALL)
_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/@\s]*@", re.IGNORECASE)
_RUN = re.compile(r"[A-Za-z0-9+=_-]{20,}")
_LEAST_BITS = 3.5  # of entropy a character: words have less, random hexadecimal digits have 4 at the most


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or an option is that of a secret.

    >>> is_secret_name("WANDB_API_KEY"), is_secret_name("--hf-token"), is_secret_name("MONKEY_COUNT")
    (True, True, False)
    """
    return _NAMES.search(name.lstrip("-")) is not None


def looks_random(text: str) -> bool:
    """Whether a text has a part that looks drawn by chance: 20 characters or more, letters and digits mixed.

    >>> looks_random("ghp_16C7e42F292c6912E7710c838347Ae178B4a"), looks_random("/home/me/run_2026/train.py")
    (True, False)
    """
    for found in _RUN.finditer(text):
        part = found[0]
        counts = Counter(part)
        bits = -sum(count / len(part) * math.log2(count / len(part)) for count in counts.values())
        digits = sum(char.isdigit() for char in part)
        if bits >= _LEAST_BITS and digits * 6 >= len(part) and digits < len(part):
            return True
    return False


def shown_value(name: str, value: str) -> str:
    """Return a value, or what stands in its place if it, or its name, is that of a secret.

    >>> shown_value("NCCL_DEBUG", "INFO"), shown_value("DB_PASSWORD", "x")
    ('INFO', '(left out)')
    """
    if value and (is_secret_name(name) or looks_random(value)):
        return HIDDEN
    return _IN_URL.sub(rf"\1{HIDDEN}@", value)


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without its secrets.

    >>> shown_arguments(["train.py", "--token", "abc", "--lr=0.1", "--db-password=x", "s3://me:pw@host/b"])
    ['train.py', '--token', '(left out)', '--lr=0.1', '--db-password=(left out)', 's3://(left out)@host/b']
    """
    shown: list[str] = []
    before = ""
    for part in arguments:
        assigned = _ASSIGNED.fullmatch(part)
        if assigned:
            shown.append(f"{assigned['name']}={shown_value(assigned['name'], assigned['value'])}")
        elif before.startswith("-") and not part.startswith("-"):
            shown.append(shown_value(before, part))
        else:
            shown.append(shown_value("", part))
        before = "" if assigned else part
    return shown
