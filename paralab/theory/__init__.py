"""What the papers say, as functions, and the engine of simulation and replay; no torch."""
