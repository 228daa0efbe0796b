"""Durable state: memory for tests, SQLite embedded, etcd for clusters."""
