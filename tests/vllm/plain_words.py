"""What test and trainer's process of test_without_guard.py agree upon, without torch."""

DIED = 9  # exit status
