"""Write the price of a plan as an expression in sizes and bandwidths, and solve where two plans cross."""
