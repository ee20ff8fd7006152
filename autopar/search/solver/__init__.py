"""Find the least sum of a factor graph, and a bound that certifies it. Nothing here is about programs."""
