"""The textbook: pipeline schedules, and for every other paradigm a pass over a rank's program.
README's "Read on" has an order in which to read the files.
"""
