"""Hold, print, explain, save and load what a search found."""
