"""Capture a call with sizes that are symbols, so that one program serves many batches and lengths."""
