"""``python -m autopar`` is the command ``autopar``; so is ``torchrun … -m autopar``."""

from autopar.cli.app import app

app(prog_name="autopar")
