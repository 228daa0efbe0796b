"""The Weightplane control plane: a pure core, a gRPC server around it, and the stores that make it durable."""
