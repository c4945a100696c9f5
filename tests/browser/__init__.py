"""The labs and the widgets in real JupyterLab, in a real browser, as a student sees them."""
