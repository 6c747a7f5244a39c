"""Conformance checks for extensions: policies, codecs, transports, models and ops. Each raises AssertionError."""
