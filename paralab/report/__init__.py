"""The tables behind a report: their columns, how parts merge, their numbers, their file."""
