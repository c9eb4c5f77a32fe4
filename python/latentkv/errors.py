"""The one exception of the Python layer. Native code and the converter raise their own, in the same one-line
form."""


class LatentKVError(ValueError):
    """Bad input or state, said in one line: `[where] expected …; got …`, then the flag to change."""

    __module__ = "latentkv"


def expected(where: str, wanted: str, got: object, hint: str = "") -> LatentKVError:
    """Builds the error, so that every message has the same form.

    >>> str(expected("max_tokens", "an integer", "'ten'", "use -1 for no limit"))
    "[max_tokens] expected an integer; got 'ten'; use -1 for no limit"
    """
    message = f"[{where}] expected {wanted}; got {got}"
    return LatentKVError(f"{message}; {hint}" if hint else message)
