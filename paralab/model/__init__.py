"""The model: the ops that a program runs (ops.py), and a plain GPT to compare them with."""
