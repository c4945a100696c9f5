"""What is trained: the ops a program runs (ops.py), and a plain GPT to hold them against."""
