"""The formats of JSON schemas that a grammar enforces."""

from __future__ import annotations

# llguidance has a regular expression for each.
STRING_FORMATS = (
    "date-time",
    "date",
    "time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
NO_FORMATS = ("password", "binary", "float", "double")  # OpenAPI's: hints, every value has them
RANGES = {  # OpenAPI's and protobuf's, of integers
    f"{sign}int{bits}": (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for bits in (8, 16, 32, 64)
    for sign in ("", "u")
}

# llguidance takes every year for a leap year, and a second 60 in any minute.
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = rf"^(?:{_YEAR}-(?:[0-9]{{2}}-(?:[01][0-9]|2[0-8])|(?:0[13-9]|1[0-2])-[23][0-9])|{_LEAP_YEAR}-02-29)"
_SECOND = r"[0-9]{2}:[0-9]{2}:[0-5][0-9]"
# What a format's texts have to match besides.
PATTERNS = {"date": (_DAY,), "time": (_SECOND,), "date-time": (_DAY, _SECOND)}
