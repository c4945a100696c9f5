"""Saves a kernel's first picture two to four seconds: a grammar is built when it is first used.

plotly imports nbformat, which imports jsonschema, which imports rfc3987_syntax where JupyterLab has
brought it along, for schemas that want an IRI. That package parses a grammar as it is imported
(2.2 s in python-jsonschema/jsonschema#1521, where a successor that does not is proposed), and no
notebook has an IRI to check. So a stand-in is imported in its place, which becomes the real one
with the first question that it is asked.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

NAME = "rfc3987_syntax"


def _real(name: str) -> Any:
    """What the package has of this name; it is loaded now."""
    if name.startswith("__"):  # code that goes through all modules asks for these
        raise AttributeError(name)
    if sys.modules.get(NAME) is late:
        del sys.modules[NAME]
    return getattr(importlib.import_module(NAME), name)


if NAME not in sys.modules and (found := importlib.util.find_spec(NAME)) is not None:
    sys.modules[NAME] = late = ModuleType(NAME)
    late.__spec__, late.__path__ = found, found.submodule_search_locations
    late.__file__, late.__getattr__ = found.origin, _real
    late.is_valid_syntax = lambda term, value: _real("is_valid_syntax")(term, value)
