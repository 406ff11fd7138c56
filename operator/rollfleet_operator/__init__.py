"""The operator of rollout fleets: RolloutEngine and WeightVersion made true on Kubernetes."""
