"""Measure and report steps: time, memory, communication, ranks."""
