"""Device and host kernels: one family per file, each with a reference of the same name."""
