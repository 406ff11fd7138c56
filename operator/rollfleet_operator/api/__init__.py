"""The Kubernetes API of rollfleet: typed objects, from which the CRDs are generated."""
