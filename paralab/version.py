"""The one place that says which version of paralab this is; pyproject.toml reads it."""

__version__ = "0.1.0"
