"""The weightplane command."""
