"""Measure how long the calls of local programs take."""
