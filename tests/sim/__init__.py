"""A seeded simulator of whole fleets: the product's state machines, everything around them faked."""
