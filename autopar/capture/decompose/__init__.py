"""Replace ops by simpler ones: at capture, where no sharding rule describes an op, and in the pass expand, where a dim
is split."""
