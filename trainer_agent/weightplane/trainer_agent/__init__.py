"""The trainer's side: Publisher and the sources of tensors."""
