"""Times: what two clocks say about a call, and the ratios of times."""
