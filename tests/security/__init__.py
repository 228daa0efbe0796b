"""Identities, TLS, strangers, pickles and junk, mostly against real processes."""
