"""What of command lines and environments is no secret. A page is mailed to people who were never meant to have any.

A secret is known by the name before it, by its form, or because it looks drawn by chance. One without any of these, as
after ``-p``, is not known.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

HIDDEN = "(left out)"
"""What stands in place of a secret."""

# Patterns are compiled when they are first used: a launcher whose environment has no variable of note uses none.

_WORDS = (
    *("key", "keys", "pass", "pwd", "passwd", "passphrase", "auth", "authorization", "dsn", "sas", "session"),
    *("signature", "private", "bearer", "salt", "jwt"),
)
_ENDINGS = (
    *("token", "tokens", "secret", "secrets", "password", "passwords", "passwd", "credential", "credentials"),
    *("cookie", "cookies", "apikey", "apikeys", "accesskey", "authkey", "secretkey", "privatekey"),
)
_HARMLESS = r"(?i)true|false|yes|no|on|off|none|null|[01]?"
_COUNTED = ("tokens", "keys")  # a number of them is no secret: --max-tokens 2048
_ASSIGNED = r"(?s)(?P<name>[+-]{0,2}[\w.-]+)=(?P<value>.*)"
_VALUE = r"""(?P<value>"[^"]*"|'[^']*'|[^\s"']+)"""
_AFTER_NAME = rf"""(?i)["']?\s*[=:]\s*(?:(?:bearer|basic|token)\s+)?{_VALUE}"""
_AFTER_OPTION = rf"\s+(?!-){_VALUE}"
_IN_URL = r"(?i)(\b[a-z][a-z0-9+.-]{0,20}://)[^/?#\s]*@"
_KNOWN = (
    r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|$)"
    r"|\b(?:hf_|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|eyJ|AKIA|ASIA)[\w.-]{16,}"
)
_RUN = r"[A-Za-z0-9+=_-]{20,}"
_LEAST = 20  # characters of what may look drawn by chance
_WITH_SLASHES = r"(?<![\w+/=.-])[A-Za-z0-9+/]{40}(?![\w+/=.-])"  # a secret key of AWS
_MOST_SLASHES = 3
_LEAST_BITS = 3.5  # of entropy a character: words have less, random hexadecimal digits have 4 at the most
_LEAST_CHANGES = 0.38  # of kinds, from character to character: drawn by chance 0.47 and more, CamelCase 0.3


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or an option is that of a secret.

    >>> is_secret_name("WANDB_API_KEY"), is_secret_name("--hf-token"), is_secret_name("MONKEY_COUNT")
    (True, True, False)
    """
    words = re.split(r"[_.-]", name.lower())
    return any(word in _WORDS or word.endswith(_ENDINGS) for word in words)


def looks_random(text: str) -> bool:
    """Whether a text has a part that looks drawn by chance: 20 letters and digits or more, mixed as no words are.

    >>> looks_random("ghp_16C7e42F292c6912E7710c838347Ae178B4a"), looks_random("/home/me/ckpt-epoch_12-step_120000")
    (True, False)
    """
    return any(map(_is_random, re.split(r"[^A-Za-z0-9+=]", text)))


def _is_random(part: str) -> bool:
    if len(part) < _LEAST or part.isdecimal():
        return False
    counts = Counter(part)
    bits = -sum(count / len(part) * math.log2(count / len(part)) for count in counts.values())
    digits = sum(char.isdigit() for char in part)
    kinds = [(char.isdigit(), char.isupper()) for char in part]
    changes = sum(one != other for one, other in pairwise(kinds))
    return bits >= _LEAST_BITS and (digits * 6 >= len(part) or changes >= _LEAST_CHANGES * (len(part) - 1))


def shown_text(text: str) -> str:
    """Return a text without the secrets in it, such as a command line in one string.

    >>> shown_text("curl -H 'Authorization: Bearer abc' --api-key x https://me:pw@host/?token=y /data/run_2026")
    "curl -H 'Authorization: Bearer (left out)' --api-key (left out) https://(left out)@host/?token=(left out) /data/run_2026"
    """  # noqa: E501 - one line
    parts, at = [], 0
    for found in re.finditer(r"[\w.-]+", text):
        if found.start() < at or not is_secret_name(found[0]):
            continue
        after = re.compile(_AFTER_NAME).match(text, found.end())
        if after is None and found[0].startswith("-"):
            after = re.compile(_AFTER_OPTION).match(text, found.end())
        if after is not None and not _is_harmless(found[0], after["value"]):
            parts += [text[at : after.start("value")], HIDDEN]
            at = after.end()
    text = "".join([*parts, text[at:]])
    text = re.sub(_KNOWN, HIDDEN, text)
    text = re.sub(_IN_URL, rf"\1{HIDDEN}@", text)
    text = re.sub(_WITH_SLASHES, lambda found: HIDDEN if _has_slashes_by_chance(found[0]) else found[0], text)
    return re.sub(_RUN, lambda found: HIDDEN if looks_random(found[0]) else found[0], text)


def _has_slashes_by_chance(text: str) -> bool:
    return text.count("/") <= _MOST_SLASHES and any(map(str.isdigit, text)) and _is_random(text.replace("/", ""))


def _is_harmless(name: str, value: str) -> bool:
    is_count = value.isdecimal() and any(word in name.lower() for word in _COUNTED)
    return is_count or re.fullmatch(_HARMLESS, value) is not None


def shown_value(name: str, value: str) -> str:
    """Return a value without secrets, or what stands in its place if its name is that of one.

    >>> shown_value("NCCL_DEBUG", "INFO"), shown_value("DB_PASSWORD", "x"), shown_value("--max-tokens", "2048")
    ('INFO', '(left out)', '2048')
    """
    if is_secret_name(name) and not _is_harmless(name, value):
        return HIDDEN
    return shown_text(value)


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without its secrets.

    >>> shown_arguments(["train.py", "--token", "abc", "--lr=0.1", "--db-password=x", "s3://me:pw@host/b"])
    ['train.py', '--token', '(left out)', '--lr=0.1', '--db-password=(left out)', 's3://(left out)@host/b']
    """
    shown: list[str] = []
    before = ""
    for part in arguments:
        assigned = re.fullmatch(_ASSIGNED, part)
        if assigned:
            shown.append(f"{assigned['name']}={shown_value(assigned['name'], assigned['value'])}")
        elif before.startswith("-") and not part.startswith("-"):
            shown.append(shown_value(before, part))
        else:
            shown.append(shown_text(part))
        before = "" if assigned else part
    return shown
