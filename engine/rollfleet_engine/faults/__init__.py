"""Fault injection: an engine that fails as a plan says, for whoever wants to know how their fleet and trainer bear it.

The simulator takes a plan by an option of its own; the proxy stands in front of a real engine. Neither can be reached
from a spec, the environment or the control port: docs/fault-injection.md.
"""
