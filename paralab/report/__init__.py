"""A report: its tables and metrics, how the parts of ranks are merged, and how it is saved."""
