"""A trainer that pushes one version: the same script for every backend."""
