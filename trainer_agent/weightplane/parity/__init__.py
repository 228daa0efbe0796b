"""Whether engine and trainer compute the same policy: audit of settings, probe, diagnosis, figures per batch."""
