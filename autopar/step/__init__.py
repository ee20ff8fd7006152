"""The whole training step as static programs. Read in this order: ``program`` (what a step is), ``micro``, ``rows``, ``terms``, ``counts``, ``copies``,
``update``, ``zero``, ``early``, ``joined`` (what its programs are), ``options``, ``batches``, ``compile``, ``optimizer_state`` (the optimizer), ``average``, ``runs``, ``fit``, ``state``,
``memory``, ``train_step`` (what the user holds). ``assembly`` is how traced programs are made."""
