"""Times: requests with two clocks, rounds in which entrants take turns, ratios."""
