"""The textbook: one paradigm, one file. Start with data_parallel.py."""
