"""The textbook: schedules, and a pass for every other paradigm. Start with data_parallel.py."""
