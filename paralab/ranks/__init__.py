"""Ranks as processes: how they are started, watched and ended; `paralab.launch` uses all of it."""
