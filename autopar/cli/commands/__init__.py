"""Define the options of each command and their help, one command a file."""
