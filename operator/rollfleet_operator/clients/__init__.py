"""The outside world: API server, guards, certificates, events, metrics. Errors of all of them are in `errors`."""
