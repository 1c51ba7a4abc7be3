"""Many adapters beside one base."""
