"""One answer per exercise, with the markers that make it a stub; read as text by exercise.py."""
