"""The whole training step as static programs. Read in this order: ``program`` (what a step is), ``micro``, ``counts``, ``copies``,
``update``, ``zero`` (what its programs are), ``options``, ``batches``, ``compile``, ``owned`` (the optimizer), ``runs``, ``state``,
``memory``, ``train_step`` (what the user holds). ``assembly`` is how traced programs are made."""
