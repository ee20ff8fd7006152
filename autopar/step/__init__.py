"""Run the whole training step as static programs.

Read the modules in this order. The programs: ``program`` (what a step is), ``micro``, ``batch_independence``,
``terms``, ``counts``, ``copies``, ``update``, ``zero``, ``hoisted_counts``, ``merged_programs``; ``graph_builder``
builds them. Running them: ``options``, ``batches``, ``compile``, ``optimizer_state``, ``average``, ``runs``, ``fit``,
``state``, ``memory``, ``captures``. The user has a ``train_step``.
"""
