"""Many adapters on one base."""
