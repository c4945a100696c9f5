"""What the papers say, as functions; schedules proved and simulated; replay. No torch."""
