"""Emulate a wire: process groups whose transfers take as long as a given network would take."""
