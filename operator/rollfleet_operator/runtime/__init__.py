"""The shell: kopf feeds a keyed queue; a pass observes, plans and applies."""
