"""Transports: they move planned bytes between members and report completion. They know no phases."""
