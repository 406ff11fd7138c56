"""The guard: gate, identity and weight updates in front of an engine, inside its process."""
