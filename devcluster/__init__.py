"""A real Kubernetes on one Debian machine, from package registries alone; for development and tests.

Only the standard library is used, so that `python3 -m devcluster up` works before any virtual environment exists.
"""
