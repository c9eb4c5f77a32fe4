"""Numbers of JSON schemas, for llguidance: it reads them as 64-bit floats and bounds as 18 digits, so what
would be rounded away is made stricter here, or refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

from latentkv.sampling.pattern import UNWRITABLE

Refuse = Callable[[str, str], NoReturn]  # (keyword, what is expected of its value)

FARTHEST = 10**18  # an integer's bound; a bound beyond it is as good as none
FARTHEST_FLOAT = 10**17
USUAL = 10**15  # an integer's bound where there is none: doubles have all integers below
_SMALLEST = Fraction(1, 10**15)
MOST_STEPS = 10_000  # of multipleOf, whose digits are followed by an automaton of so many states


def count(value: Any, keyword: str, refuse: Refuse) -> int:
    """A number of characters, items or keys."""
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or not 0 <= value < 2**53:
        refuse(keyword, "a whole number of at least 0")
    return int(value)


def number_bounds(
    schema: Mapping[str, Any], is_integer: bool, refuse: Refuse, within: tuple[int, int] | None = None
) -> dict[str, Any]:
    """minimum, maximum and their exclusive forms, draft 4's booleans too, as llguidance obeys them. Bounds
    beyond 10^18 (10^17 for floats), as those of int64, become that: fewer numbers are allowed, none more.
    within: the least and the largest number that the schema allows besides."""
    low, low_open = _bound(schema, "minimum", "exclusiveMinimum", max, refuse)
    high, high_open = _bound(schema, "maximum", "exclusiveMaximum", min, refuse)
    if within is not None:
        if low is None or low < within[0]:
            low, low_open = Fraction(within[0]), False
        if high is None or high > within[1]:
            high, high_open = Fraction(within[1]), False
    if is_integer:
        return _integer_bounds(low, low_open, high, high_open, refuse)
    out: dict[str, Any] = {}
    far = Fraction(FARTHEST_FLOAT)
    if low is not None and high is not None and (low > high or (low == high and (low_open or high_open))):
        refuse(
            "minimum" if "minimum" in schema else "exclusiveMinimum", f"less than the maximum, {_text(high)}"
        )
    if low is not None and high is not None and high - low < 1:
        # between 0 and 0.5 llguidance takes an exclusive 0 for an inclusive one
        inside = (high - low) / 10**6
        if low_open and low.denominator == 1:
            low, low_open = low + inside, False
        if high_open and high.denominator == 1:
            high, high_open = high - inside, False
    if low is not None and low > far:
        refuse("minimum", f"at most {float(far):g}")
    if high is not None and high < -far:
        refuse("maximum", f"at least {-float(far):g}")
    if low is not None:
        out["exclusiveMinimum" if low_open else "minimum"] = _inwards(max(low, -far), up=True)
    if high is not None:
        out["exclusiveMaximum" if high_open else "maximum"] = _inwards(min(high, far), up=False)
    return out


def _integer_bounds(
    low: Fraction | None, low_open: bool, high: Fraction | None, high_open: bool, refuse: Refuse
) -> dict[str, Any]:
    least = None if low is None else math.floor(low) + 1 if low_open else math.ceil(low)
    most = None if high is None else math.ceil(high) - 1 if high_open else math.floor(high)
    if least is not None and least > FARTHEST:
        refuse("minimum", f"at most {FARTHEST}")
    if most is not None and most < -FARTHEST:
        refuse("maximum", f"at least {-FARTHEST}")
    if least is not None and most is not None and least > most:
        refuse("minimum", f"an integer between it and the maximum, {most}")
    # both ends: llguidance takes all 18 digits then, and a small model never ends a number without one
    is_far = max(abs(least or 0), abs(most or 0)) >= USUAL
    usual = FARTHEST if is_far else USUAL
    least, most = -usual if least is None else least, usual if most is None else most
    out = {
        "minimum": int(_inwards(Fraction(max(least, -FARTHEST)), up=True)),
        "maximum": int(_inwards(Fraction(min(most, FARTHEST)), up=False)),
    }
    if out["minimum"] > out["maximum"]:
        refuse("minimum", "a number that 64-bit floats have, in a range this narrow")
    return out


def _bound(
    schema: Mapping[str, Any],
    keyword: str,
    exclusive: str,
    tighter: Callable[[Fraction, Fraction], Fraction],
    refuse: Refuse,
) -> tuple[Fraction | None, bool]:
    """The bound, and whether it is exclusive."""
    closed = _fraction(schema[keyword], keyword, refuse) if keyword in schema else None
    is_open = schema.get(exclusive)
    if is_open is None or is_open is False:
        return closed, False
    if is_open is True:  # draft 4: `minimum` is exclusive
        return closed, True
    bound = _fraction(is_open, exclusive, refuse)
    if closed is None or (bound == tighter(bound, closed)):
        return bound, True
    return closed, False


def _fraction(value: Any, keyword: str, refuse: Refuse) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(_float(value)):
        refuse(keyword, "a number")
    exact = Fraction(value)
    if exact and abs(exact) < _SMALLEST:
        refuse(keyword, f"0, or a number of at least {float(_SMALLEST):g}")
    return exact


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _inwards(exact: Fraction, up: bool) -> float:
    """The float at the bound, or the next one inside the range."""
    near = float(exact)
    if up and Fraction(near) < exact:
        return math.nextafter(near, math.inf)
    if not up and Fraction(near) > exact:
        return math.nextafter(near, -math.inf)
    return near


def _text(value: Fraction) -> str:
    return f"{float(value):g}"


def factor(value: Any, refuse: Refuse) -> float | int:
    """multipleOf."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        refuse("multipleOf", "a number above 0")
    digits = Decimal(str(value)).normalize().as_tuple()
    exponent = int(digits.exponent)
    steps = int("".join(map(str, digits.digits))) * 10 ** max(0, exponent)
    if steps > MOST_STEPS or exponent < -6:
        refuse("multipleOf", f"a number of at most {MOST_STEPS} steps of its last digit")
    return value


def constant(value: Any, keyword: str, refuse: Refuse) -> Any:
    """A value of enum or const; numbers in it are ones that a float has exactly, texts ones without what JSON
    writes as \\u alone."""
    if isinstance(value, str) and set(value) & UNWRITABLE:
        refuse(keyword, "text without control characters")
    elif isinstance(value, Mapping):
        for item in value.values():
            constant(item, keyword, refuse)
    elif isinstance(value, list):
        for item in value:
            constant(item, keyword, refuse)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        near = _float(value)
        if not math.isfinite(near) or Fraction(near) != Fraction(value):
            refuse(keyword, "numbers that a 64-bit float has exactly")
        if near and not 1e-15 < abs(near) < 1e17:
            refuse(keyword, "numbers between 1e-15 and 1e17")
    return value
