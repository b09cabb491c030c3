"""Tests of the referee. They need nothing but the package."""
