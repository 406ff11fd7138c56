"""Set-up of property tests."""

from hypothesis import settings

settings.register_profile("rollfleet", deadline=None)  # another test's load on the machine is no failure of this one
settings.load_profile("rollfleet")
