"""Tools around engines that are no part of a running one."""
