"""Tests of the trainer's side."""
