"""Engine adapters."""
