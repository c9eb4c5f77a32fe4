"""Stands for the native module until it is imported: loads the one for this processor and gives it its place.

Its interface is _core.pyi.
"""

import importlib.util
import sys
from importlib.machinery import EXTENSION_SUFFIXES

from latentkv import processor

_files = [processor.folder() / f"_core{suffix}" for suffix in EXTENSION_SUFFIXES]
_file = next((file for file in _files if file.exists()), None)
if _file is None:
    raise ImportError(f"expected {_files[0]}; got no such file", name=__name__)
_spec = importlib.util.spec_from_file_location(__name__, _file)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[__name__] = _module
_spec.loader.exec_module(_module)
