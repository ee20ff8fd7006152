"""Run the whole training step as static programs.

``TrainStep`` is what ``parallel.train_step`` returns. ``compiling`` makes its programs from a captured call,
``batches`` cuts the batch, ``states`` holds what lasts between steps, ``across`` lets communication cross the end of a
step, ``reports`` says what was decided and measured, and ``pipelined`` runs steps in stages.
"""
