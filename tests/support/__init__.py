"""Helpers that several test packages import."""
