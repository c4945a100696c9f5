"""Instruments: what a rank writes down while it trains, and what this machine measures."""
