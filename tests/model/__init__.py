"""The model: fleet, operators, API server, network and clients on a simulated clock, with faults at random.

What decides is real: `plan`, the guard's machine, the follower of a guard and the uptime of an operator. What carries
it out is modelled with all that can go wrong on the way, see `operators.py`. `promises.py` holds what must be true
after every single event. `python -m tests.model` searches, and replays a seed.
"""
