"""The commands, by what they do to a fleet: show it, move it, look into it."""
