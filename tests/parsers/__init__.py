"""Launch plans against the argument parsers of the releases themselves."""
