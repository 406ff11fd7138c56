"""The main job on a local Kubernetes: a fleet changes its weights under load, and every answer is checked."""
