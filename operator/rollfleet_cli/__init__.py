"""`rollfleet`, also as `kubectl rollfleet`: what fleets and their updates are doing, from the objects' status alone."""
