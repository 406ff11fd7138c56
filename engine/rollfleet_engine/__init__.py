"""What runs in an engine's pod: launcher, guard, weights, simulator."""
