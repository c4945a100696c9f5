"""The textbook: schedules, and a pass for every other paradigm. README's "Read on" has an order."""
