"""Statistics of scores: bootstrap intervals and tests of differences. Pure numpy."""
