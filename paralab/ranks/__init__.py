"""Ranks as processes: how they are born, watched, heard and ended; `paralab.launch` leads in."""
