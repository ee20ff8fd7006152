"""Schedule communication against computation: one order, decided before a program runs."""
