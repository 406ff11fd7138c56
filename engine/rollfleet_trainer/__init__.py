"""The trainer's side of a push: sends weights to engines whose guards have armed an update for it."""
