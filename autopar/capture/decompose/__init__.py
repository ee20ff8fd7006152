"""Decompose ops at capture: an op that no sharding rule could describe becomes ops that have rules."""
