"""The transports: digests, buckets, and each transport through the conformance kit."""
