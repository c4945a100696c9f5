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


class _Late(ModuleType):
    """The module, before it is loaded."""

    def is_valid_syntax(self, term: str, value: str) -> bool:
        return _loaded().is_valid_syntax(term, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # code that goes through all modules asks for these
            raise AttributeError(name)
        return getattr(_loaded(), name)


def _loaded() -> ModuleType:
    if isinstance(sys.modules.get(NAME), _Late):
        del sys.modules[NAME]
    return importlib.import_module(NAME)


if NAME not in sys.modules and (found := importlib.util.find_spec(NAME)) is not None:
    sys.modules[NAME] = late = _Late(NAME)
    late.__spec__, late.__path__ = found, found.submodule_search_locations
    late.__file__ = found.origin
