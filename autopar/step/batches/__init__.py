"""Cut the batch into micro-batches, whose losses and gradients add up to those of the whole batch."""
