"""Saves a kernel's first picture two to four seconds: a grammar is built only if it is used.

plotly imports nbformat, which imports jsonschema, which imports rfc3987_syntax if it is installed,
as it is with JupyterLab: it checks IRIs. That package parses a grammar when it is imported (2.2 s
in python-jsonschema/jsonschema#1521, which proposes a successor that does not), and no notebook
has an IRI to check. So this module puts a stand-in into sys.modules, which imports the real package
when something of it is first used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

NAME = "rfc3987_syntax"


def _real(name: str) -> Any:
    """An attribute of the real package, which is imported now."""
    if name.startswith("__"):  # code that inspects all modules reads these
        raise AttributeError(name)
    if sys.modules.get(NAME) is stand_in:
        del sys.modules[NAME]
    return getattr(importlib.import_module(NAME), name)


if NAME not in sys.modules and (found := importlib.util.find_spec(NAME)) is not None:
    sys.modules[NAME] = stand_in = ModuleType(NAME)
    stand_in.__spec__, stand_in.__path__ = found, found.submodule_search_locations
    stand_in.__file__, stand_in.__getattr__ = found.origin, _real
    stand_in.is_valid_syntax = lambda term, value: _real("is_valid_syntax")(term, value)
