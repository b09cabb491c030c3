"""From sources to a loaded extension, or to a bundle."""
