"""What the papers say, as functions: plain Python, no torch. The engine behind simulation and replay."""
