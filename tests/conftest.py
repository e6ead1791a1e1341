"""What all tests share: examples of hypothesis have no deadline, as the machines that run them are shared."""

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
