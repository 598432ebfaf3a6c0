"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does, and proves nothing.
settings.register_profile(
    "elastane", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("elastane")
