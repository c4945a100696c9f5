"""How long a test waits for what never comes: one number, against hangs alone.

Nothing that `make test` runs is held to a time (benchmarks are), so every wait for a page, a
process or a kernel gets the same limit, more than ten times what the longest of them takes on an
idle machine. pytest's own limit for a whole test is in pyproject.toml, and is longer.
"""

HANG_S = 240.0
