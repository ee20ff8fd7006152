"""Lower local programs to Python functions of ATen ops and functional collectives."""
