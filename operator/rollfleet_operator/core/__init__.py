"""Decisions of the operator: pure functions of plain data. No clock, network, kopf or logging here."""
