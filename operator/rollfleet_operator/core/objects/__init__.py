"""Builders of the objects that a fleet owns: pure, complete, and equal for equal input."""
