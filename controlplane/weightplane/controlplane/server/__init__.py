"""The gRPC services over the core: validate, step, carry out the effects."""
