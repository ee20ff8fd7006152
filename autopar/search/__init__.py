"""Search the cheapest plan of a program exactly, with a bound that certifies how far from optimal it can be."""
