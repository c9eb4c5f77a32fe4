"""llama.cpp's environment variables: LLAMA_ARG_CTX_SIZE=4096 is --ctx-size 4096."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from latentkv.errors import expected

_PREFIX = "LLAMA_ARG_"
_OTHERS = {  # whose flags have other names
    "LLAMA_API_KEY": "--api-key",
    "LLAMA_ARG_BATCH": "--batch-size",
    "LLAMA_ARG_DIO": "--direct-io",
    "LLAMA_ARG_ENDPOINT_METRICS": "--metrics",
    "LLAMA_ARG_ENDPOINT_PROPS": "--props",
    "LLAMA_ARG_ENDPOINT_SLOTS": "--slots",
    "LLAMA_ARG_FIT_ESTIMATE": "--fit-print",
    "LLAMA_ARG_N_PARALLEL": "--parallel",
    "LLAMA_ARG_ROPE_SCALING_TYPE": "--rope-scaling",
    "LLAMA_ARG_STATIC_PATH": "--path",
    "LLAMA_ARG_THINK": "--reasoning-format",
    "LLAMA_ARG_THINK_BUDGET": "--reasoning-budget",
    "LLAMA_ARG_THINK_BUDGET_MESSAGE": "--reasoning-budget-message",
    "LLAMA_ARG_UBATCH": "--ubatch-size",
}
_ON, _OFF = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0")


def words(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> dict[str, list[str]]:
    """By variable what it would be on the command line. As in llama.cpp a variable for another command does
    not count.

    Raises:
        LatentKVError: a flag's variable that is neither on nor off.
    """
    flags = parser._option_string_actions  # by name; argparse has no public way to find one
    found = {}
    for name in sorted(environment):
        value = environment[name]
        flag = _OTHERS.get(name, "--" + name.removeprefix(_PREFIX).lower().replace("_", "-"))
        if (name.startswith(_PREFIX) or name in _OTHERS) and flag in flags:
            if flags[flag].nargs != 0:
                found[name] = [f"{flag}={value}"]
            elif name.startswith(f"{_PREFIX}NO_") or _is_on(name, value):
                found[name] = [flag]
            elif (other := flag.replace("--", "--no-", 1)) in flags:
                found[name] = [other]
    return found


def _is_on(name: str, value: str) -> bool:
    if value not in (*_ON, *_OFF):
        raise expected(name, "on or off", repr(value))
    return value in _ON
