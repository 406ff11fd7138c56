"""The launcher: plans the engine's command from its configuration and looks after the process as PID 1."""
