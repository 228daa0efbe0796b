"""The pure core: manifests, placements, plans and the state machines. No I/O, no clock, no torch, no grpc."""
