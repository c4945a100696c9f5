"""What can be done with a program: run it, time it, weigh it, count its bytes, print it."""
