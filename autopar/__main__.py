"""Run the command ``autopar`` as ``python -m autopar``, or as ``torchrun … -m autopar``."""

from autopar.cli.app import app

app(prog_name="autopar")
