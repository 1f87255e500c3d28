"""One short script for each table or figure, each made from run logs alone."""
