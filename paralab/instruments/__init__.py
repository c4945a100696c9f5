"""Instruments: what records a rank's times, traffic and memory, and what measures this machine."""
