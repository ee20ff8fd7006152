"""Decompose ops at capture: those that no sharding rule could describe become ops that have one."""
