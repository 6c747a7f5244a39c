"""Conformance checks for extensions: policies, codecs, models and ops. Each raises AssertionError."""
