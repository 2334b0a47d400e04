"""What changes no number of an algorithm. Scripts import from common alone."""
